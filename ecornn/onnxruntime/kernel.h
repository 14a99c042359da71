// A node of a session: a module, and the layer of it that has the node's weights.
#ifndef ECORNN_ORT_KERNEL_H_
#define ECORNN_ORT_KERNEL_H_

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ecornn.hpp"
#include "node.h"
#include "ort_api.h"
#include "shared.h"
#include "status.h"
#include "tensors.h"

namespace ort {

// Inputs; weights are the last ones. Outputs are y, then the last states.
enum Input : size_t { kX, kLengths, kStates, kWeights = 4 };

class Kernel {
 public:
  // Raises Refused, Raised or ecornn::Error. `threads`: of a CPU, for each call.
  Kernel(const Api& api, const KernelInfo* info, bool cuda, int threads)
      : api_(api), threads_(threads), module_(ModuleOf(api, info)), weights_(WeightsOf(api, info, kWeights)),
        device_(cuda ? DeviceOf(api, info) : 0) {
    const ecornn_description& d = module_->description();
    if ((d.device_type == kDLCUDA) != cuda) throw Refused(cuda ? "its module is for CPUs" : "its module is for GPUs");
    if (weights_ != static_cast<size_t>(d.parameter_count)) {
      throw Refused("it has " + std::to_string(weights_) + " weights; its module has " +
                    std::to_string(d.parameter_count));
    }
    std::vector<Array> arrays;
    Content content{reinterpret_cast<uintptr_t>(module_.get()), static_cast<uint64_t>(threads),
                    static_cast<uint64_t>(device_)};
    for (size_t n = 0; n < weights_; ++n) {
      int constant = 0;
      const Value* value = nullptr;
      Must(api.constant(info, kWeights + n, &constant, &value));
      if (!constant && cuda) throw Refused("on a GPU its weights must be constants");
      if (!constant) return;  // they come with each call
      arrays.push_back(Array::Of(api, value));
      Add(&content, arrays.back());
    }
    static auto* const layers = new Shared<Content, Bound>;
    layer_ = layers->Of(content, [&] { return new Bound{module_, Bind(arrays)}; });
  }

  // Several threads may do so at a time.
  void Compute(KernelContext* context) const {
    const ecornn_description& d = module_->description();
    const std::optional<Array> x = Find(context, kX);
    if (!x || x->shape.size() != 3) throw Refused("X must have three axes");
    const int64_t steps = x->shape[0], rows = x->shape[1];
    const bool both = d.directions > 1;
    Given given{*x, Make(context, 0, {steps, both ? rows : 1, both ? 2 : rows, d.hidden}), Find(context, kLengths), {}, {}};
    given.y.shape = {steps, rows, d.directions * d.hidden};
    for (size_t n = 0; n < static_cast<size_t>(d.state_count); ++n) {
      given.before.push_back(Find(context, kStates + n));
      given.after.push_back(Make(context, 1 + n, {d.directions, rows, d.hidden}));
    }
    void* stream = nullptr;
    if (d.device_type == kDLCUDA) Must(api_.stream(context, &stream));
    const auto run = [&](const ecornn::Layer& layer) {
      for (int64_t first = 0; first < rows; first += d.batch) {  // as many at a time as the module was compiled for
        Run(layer, given, {rows, first, std::min(d.batch, rows - first)}, stream);
      }
    };
    if (layer_) {
      run(layer_->layer);
    } else {
      std::vector<Array> arrays;
      for (size_t n = 0; n < weights_; ++n) arrays.push_back(Find(context, kWeights + n).value());
      run(Bind(arrays));
    }
    if (given.lengths && d.device_type == kDLCPU) ClearRowsWithoutSteps(given);
  }

 private:
  // A call's arrays but for the weights.
  struct Given {
    Array x, y;
    std::optional<Array> lengths;
    std::vector<std::optional<Array>> before;
    std::vector<Array> after;
  };

  void Run(const ecornn::Layer& layer, const Given& given, Rows rows, void* stream) const {
    const ecornn_description& d = module_->description();
    Tensors tensors({d.device_type, device_}, rows);
    std::vector<const DLTensor*> before;
    std::vector<DLTensor*> after;
    bool begins = false;
    for (const std::optional<Array>& state : given.before) begins |= state.has_value();
    for (const std::optional<Array>& state : given.before) {
      if (!begins) break;
      if (!state && d.device_type == kDLCUDA) {
        throw Refused("on a GPU it must have both initial_h and initial_c, or none");
      }
      before.push_back(Own(state ? tensors.Read(*state)
                                 : tensors.Zeros(given.x.type, {d.directions, rows.count, d.hidden}), d.directions));
    }
    for (const Array& state : given.after) after.push_back(Own(tensors.Write(state), d.directions));
    ecornn_call call{};
    call.size = sizeof call;
    call.x = tensors.Read(given.x);
    call.y = tensors.Write(given.y);
    call.state_in = begins ? before.data() : nullptr;
    call.state_out = after.data();
    if (given.lengths) call.lengths = tensors.Read(*given.lengths);
    call.stream = stream;
    ecornn_error error{};
    ecornn::detail::Throw(ecornn_run(layer.get(), &call, &error), error);
    tensors.Finish();
  }

  // Their last states are zeros in ONNX Runtime's own operators; a module leaves the first ones.
  static void ClearRowsWithoutSteps(const Given& given) {
    const int32_t* lengths = static_cast<const int32_t*>(given.lengths->data);
    for (const Array& state : given.after) {
      const int64_t rows = state.shape[1];
      const size_t row = state.bytes() / static_cast<size_t>(std::max<int64_t>(1, state.shape[0] * rows));
      for (int64_t n = 0; n < state.shape[0] * rows; ++n) {
        if (lengths[n % rows] == 0) std::memset(static_cast<char*>(state.data) + n * row, 0, row);
      }
    }
  }

  // A state (D, B, H), which modules of one direction have as (B, H).
  static DLTensor* Own(DLTensor* state, int64_t directions) {
    if (directions == 1 && state->ndim == 3 && state->shape[0] == 1) {
      ++state->shape;
      --state->ndim;
    }
    return state;
  }

  ecornn::Layer Bind(const std::vector<Array>& arrays) const {
    const ecornn_description& d = module_->description();
    ecornn::Named named;
    for (size_t n = 0; n < arrays.size(); ++n) {
      const std::vector<int64_t>& shape = arrays[n].shape;
      if (shape.empty() || shape.size() > 2) throw Refused("a weight must have one axis or two");
      const DLDevice host{kDLCPU, 0};
      const ecornn::Tensor tensor = shape.size() == 1
                                        ? ecornn::Tensor(arrays[n].data, {shape[0]}, arrays[n].dl_type(), host)
                                        : ecornn::Tensor(arrays[n].data, {shape[0], shape[1]}, arrays[n].dl_type(), host);
      named.emplace_back(d.parameters[n].name, tensor);
    }
    return module_->bind(named, threads_, device_);
  }

  std::optional<Array> Find(const KernelContext* context, size_t number) const {
    const Value* value = nullptr;
    Must(api_.input(context, number, &value));
    if (!value) return std::nullopt;
    return Array::Of(api_, value);
  }

  Array Make(KernelContext* context, size_t number, const std::vector<int64_t>& shape) const {
    Value* value = nullptr;
    Must(api_.output(context, number, shape.data(), shape.size(), &value));
    if (!value) throw Refused("its output " + std::to_string(number) + " must have a name");
    return Array::Of(api_, value);
  }

  const Api api_;
  const int threads_;
  const std::shared_ptr<const ecornn::Module> module_;
  const size_t weights_;  // their number
  const int device_;
  std::shared_ptr<const Bound> layer_;  // where weights are constants
};

}  // namespace ort

#endif  // ECORNN_ORT_KERNEL_H_
