// Compiled recurrent layers, called from C++17: ecornn.h with owners and exceptions.
//
//   ecornn::Module module("lstm.so");
//   ecornn::Layer layer = module.bind({{"weight_ih_l0", ecornn::Tensor(w, {4 * H, I})}, ...});
//   layer.run(ecornn::Call(x, y).state_in({h, c}).state_out({h, c}));
//
// A Module must live as long as its layers, memory of Tensors as long as they are used. Several threads may call one Layer.
#ifndef ECORNN_HPP_
#define ECORNN_HPP_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ecornn.h"

namespace ecornn {

class Error : public std::runtime_error {
 public:
  explicit Error(const ecornn_error& error) : std::runtime_error(error.message), status_(error.code) {}
  ecornn_status status() const { return static_cast<ecornn_status>(status_); }

 private:
  int32_t status_;
};

namespace detail {
template <typename T> struct Type;
template <> struct Type<float> { static constexpr DLDataType value{kDLFloat, 32, 1}; };
template <> struct Type<double> { static constexpr DLDataType value{kDLFloat, 64, 1}; };
template <> struct Type<int32_t> { static constexpr DLDataType value{kDLInt, 32, 1}; };
template <> struct Type<uint8_t> { static constexpr DLDataType value{kDLUInt, 8, 1}; };
}  // namespace detail

// A contiguous array of somebody else's, of up to three axes; allocates nothing.
class Tensor {
 public:
  Tensor() = default;
  template <typename T>
  Tensor(T* data, std::initializer_list<int64_t> shape, DLDevice device = {kDLCPU, 0})
      : Tensor(data, shape, detail::Type<std::remove_const_t<T>>::value, device) {}
  // Of a type that C++17 has no name for, such as {kDLBfloat, 16, 1}.
  Tensor(const void* data, std::initializer_list<int64_t> shape, DLDataType type, DLDevice device = {kDLCPU, 0})
      : Tensor(data, shape.begin(), shape.size(), type, device) {}
  Tensor(const void* data, const int64_t* shape, size_t ndim, DLDataType type, DLDevice device = {kDLCPU, 0}) {
    if (ndim > shape_.size()) throw std::invalid_argument("ecornn::Tensor: three axes at most");
    for (size_t n = 0; n < ndim; ++n) shape_[n] = shape[n];
    ndim_ = static_cast<int32_t>(ndim);
    data_ = const_cast<void*>(data);
    type_ = type;
    device_ = device;
  }

  // As C has it, as long as this lives where it is.
  DLTensor dl() const { return {data_, device_, ndim_, type_, const_cast<int64_t*>(shape_.data()), nullptr, 0}; }

 private:
  void* data_ = nullptr;
  DLDevice device_{kDLCPU, 0};
  DLDataType type_{kDLFloat, 32, 1};
  int32_t ndim_ = 0;
  std::array<int64_t, 3> shape_{};
};

using Named = std::vector<std::pair<std::string, Tensor>>;

// The arguments of a call; make it once where calls must not allocate.
class Call {
 public:
  Call(Tensor x, Tensor y) {
    call_.size = sizeof call_;
    call_.x = Hold(x);
    call_.y = Hold(y);
  }
  Call(const Call&) = delete;
  Call(Call&&) = default;

  Call& state_in(std::initializer_list<Tensor> states) & { return Set(states, &in_, &call_.state_in); }
  Call& state_out(std::initializer_list<Tensor> states) & { return Set(states, &out_, &call_.state_out); }
  Call& lengths(Tensor tensor) & { return Set(tensor, &call_.lengths); }
  Call& resets(Tensor tensor) & { return Set(tensor, &call_.resets); }
  Call& sequences(Tensor tensor) & { return Set(tensor, &call_.sequences); }
  Call& workspace(void* at, size_t bytes) & { call_.workspace = at; call_.workspace_size = bytes; return *this; }
  Call& kept(void* at, size_t bytes) & { call_.kept = at; call_.kept_size = bytes; return *this; }
  Call& stream(void* stream) & { call_.stream = stream; return *this; }
  Call& threads(int32_t count) & { call_.threads = count; return *this; }
  Call&& state_in(std::initializer_list<Tensor> states) && { return std::move(state_in(states)); }
  Call&& state_out(std::initializer_list<Tensor> states) && { return std::move(state_out(states)); }
  Call&& lengths(Tensor tensor) && { return std::move(lengths(tensor)); }
  Call&& resets(Tensor tensor) && { return std::move(resets(tensor)); }
  Call&& stream(void* stream_of) && { return std::move(stream(stream_of)); }
  Call&& threads(int32_t count) && { return std::move(threads(count)); }

  const ecornn_call& c() const { return call_; }

 private:
  struct Held {
    Tensor tensor;
    DLTensor dl;
  };

  DLTensor* Hold(const Tensor& tensor) {
    hold_.push_back(std::make_unique<Held>(Held{tensor, {}}));
    hold_.back()->dl = hold_.back()->tensor.dl();
    return &hold_.back()->dl;
  }
  Call& Set(const Tensor& tensor, const DLTensor** to) {
    *to = Hold(tensor);
    return *this;
  }
  template <typename Pointer>
  Call& Set(std::initializer_list<Tensor> states, std::vector<DLTensor*>* own, Pointer* to) {
    own->clear();
    for (const Tensor& state : states) own->push_back(Hold(state));
    *to = own->data();
    return *this;
  }

  ecornn_call call_{};
  std::vector<std::unique_ptr<Held>> hold_;
  std::vector<DLTensor*> in_, out_;
};

// Gradients that backward writes and adds to.
struct Gradients {
  Tensor dy, dx;
  std::vector<Tensor> dstate_out, dstate_in;  // or none
  Named weights;
};

namespace detail {
inline void Throw(int32_t code, const ecornn_error& error) {
  if (code != ECORNN_OK) throw Error(error);
}

struct NamedTensors {
  explicit NamedTensors(const Named& given) {
    dl.reserve(given.size());
    for (const auto& [name, tensor] : given) {
      dl.push_back(tensor.dl());
      list.push_back({name.c_str(), &dl.back()});
    }
  }
  int32_t count() const { return static_cast<int32_t>(list.size()); }

  std::vector<DLTensor> dl;
  std::vector<ecornn_named> list;
};

struct States {
  explicit States(const std::vector<Tensor>& given) {
    dl.reserve(given.size());
    for (const Tensor& tensor : given) {
      dl.push_back(tensor.dl());
      list.push_back(&dl.back());
    }
  }
  DLTensor** data() { return list.empty() ? nullptr : list.data(); }

  std::vector<DLTensor> dl;
  std::vector<DLTensor*> list;
};
}  // namespace detail

class Layer {
 public:
  explicit Layer(ecornn_layer* owned) : layer_(owned) {}

  void run(const Call& call) { Do(ecornn_run, call); }
  void forward(const Call& call) { Do(ecornn_forward, call); }
  void backward(const Call& call, const Gradients& of) {
    ecornn_error error{};
    detail::States out(of.dstate_out), in(of.dstate_in);
    const detail::NamedTensors weights(of.weights);
    const DLTensor dy = of.dy.dl();
    DLTensor dx = of.dx.dl();
    const ecornn_gradients given{sizeof given, &dy, out.data(), &dx, in.data(), weights.list.data(), weights.count()};
    detail::Throw(ecornn_backward(layer_.get(), &call.c(), &given, &error), error);
  }
  void repack(const Named& weights, void* stream = nullptr) {
    ecornn_error error{};
    const detail::NamedTensors given(weights);
    detail::Throw(ecornn_repack(layer_.get(), given.list.data(), given.count(), stream, &error), error);
  }
  int64_t workspace_size(int64_t steps, int64_t rows) const { return ecornn_workspace_size(layer_.get(), steps, rows); }
  int64_t kept_size(int64_t steps, int64_t batch) const { return ecornn_kept_size(layer_.get(), steps, batch); }
  ecornn_layer* get() const { return layer_.get(); }

 private:
  template <typename Function>
  void Do(Function function, const Call& call) {
    ecornn_error error;  // written where there is one
    const int32_t code = function(layer_.get(), &call.c(), &error);
    if (code != ECORNN_OK) throw Error(error);
  }

  struct Delete {
    void operator()(ecornn_layer* layer) const { ecornn_release(layer); }
  };
  std::unique_ptr<ecornn_layer, Delete> layer_;
};

class Module {
 public:
  explicit Module(const std::string& path) {
    ecornn_error error{};
    detail::Throw(ecornn_open(path.c_str(), &module_, &error), error);
  }
  // A layer that is linked into the program, by the function NAME_open of its header.
  explicit Module(int32_t (*open)(ecornn_module*, ecornn_error*)) {
    ecornn_error error{};
    detail::Throw(open(&module_, &error), error);
  }
  Module(const Module&) = delete;
  ~Module() { ecornn_close(&module_); }

  const ecornn_description& description() const {
    ecornn_error error{};
    const ecornn_description* found = ecornn_describe(&module_, &error);
    if (!found) throw Error(error);
    return *found;
  }

  // `threads`: CPU threads of a call; `device`: number of the GPU; `reserve`: T of the workspace that is made now; `stream`:
  // that weights on the GPU are read on.
  Layer bind(const Named& weights, int32_t threads = 1, int32_t device = 0, int64_t reserve = 1,
             void* stream = nullptr) const {
    ecornn_error error{};
    const ecornn_bind_options options{sizeof options, device, threads, reserve, stream};
    const detail::NamedTensors given(weights);
    ecornn_layer* layer = nullptr;
    detail::Throw(ecornn_bind(&module_, given.list.data(), given.count(), &options, &layer, &error), error);
    return Layer(layer);
  }
  // Weights that are linked into the program with the layer, by the function NAME_bind of its header.
  Layer bind(int32_t (*bound)(const ecornn_module*, const ecornn_bind_options*, ecornn_layer**, ecornn_error*),
             int32_t threads = 1, int64_t reserve = 1) const {
    ecornn_error error{};
    const ecornn_bind_options options{sizeof options, 0, threads, reserve, nullptr};
    ecornn_layer* layer = nullptr;
    detail::Throw(bound(&module_, &options, &layer, &error), error);
    return Layer(layer);
  }

 private:
  ecornn_module module_{};
};

}  // namespace ecornn

#endif  // ECORNN_HPP_
