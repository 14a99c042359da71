// What XLA calls for a layer: an FFI handler that runs a module by its C interface. Modules are known by the digest of
// their file, which a compiled program of XLA keeps; layers by module, device and stream, packed anew for each call.
#include <ecornn.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

enum Entry : int32_t { kRun, kForward, kBackward };

// Tensors in the memory of XLA's buffers.
class Tensors {
 public:
  Tensors(DLDevice device, size_t count) : device_(device) { made_.reserve(count); }

  bool Add(const ffi::AnyBuffer& buffer) {
    const auto dims = buffer.dimensions();
    DLDataType type{kDLFloat, 32, 1};
    switch (buffer.element_type()) {
      case ffi::DataType::F32: break;
      case ffi::DataType::F64: type.bits = 64; break;
      case ffi::DataType::F16: type.bits = 16; break;
      case ffi::DataType::BF16: type = {kDLBfloat, 16, 1}; break;
      case ffi::DataType::S32: type = {kDLInt, 32, 1}; break;
      case ffi::DataType::U8: type = {kDLUInt, 8, 1}; break;
      default: return false;
    }
    made_.push_back({buffer.untyped_data(), device_, static_cast<int32_t>(dims.size()), type,
                     const_cast<int64_t*>(dims.begin()), nullptr, 0});
    return true;
  }
  DLTensor* Next() { return &made_[next_++]; }
  std::vector<DLTensor*> Next(int32_t count) {
    std::vector<DLTensor*> found;
    for (int32_t n = 0; n < count; ++n) found.push_back(Next());
    return found;
  }

 private:
  const DLDevice device_;
  std::vector<DLTensor> made_;
  size_t next_ = 0;
};

// A module of this process, and its layers that no call uses.
class Registered {
 public:
  explicit Registered(const ecornn_api* api) : api_(api) {}

  const ecornn_api* api() const { return api_; }

  // With these weights. The caller gives it back with Give.
  ecornn_layer* Take(const std::vector<ecornn_named>& weights, int32_t device, void* stream, ecornn_error* error) {
    ecornn_layer* layer = nullptr;
    const auto count = static_cast<int32_t>(weights.size());
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      auto& idle = idle_[{device, stream}];
      if (!idle.empty()) {
        layer = idle.back();
        idle.pop_back();
      }
    }
    if (!layer) {
      ecornn_bind_options options{sizeof options, device, 0, 0, stream};
      const int32_t code = api_->bind(weights.data(), count, &options, &layer, error);
      if (code != ECORNN_VERSION) return code ? nullptr : layer;
      options.stream = nullptr;  // a file of before bind had a stream: packed again below, in the order of this one
      if (api_->bind(weights.data(), count, &options, &layer, error)) return nullptr;
    }
    if (!api_->repack(layer, weights.data(), count, stream, error)) return layer;
    Give(layer, device, stream);
    return nullptr;
  }

  void Give(ecornn_layer* layer, int32_t device, void* stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_[{device, stream}].push_back(layer);
  }

 private:
  const ecornn_api* const api_;
  std::mutex mutex_;
  std::map<std::pair<int32_t, void*>, std::vector<ecornn_layer*>> idle_;
};

std::mutex modules_mutex;
std::map<std::string, std::unique_ptr<Registered>, std::less<>>& Modules() {
  static auto* const made = new std::map<std::string, std::unique_ptr<Registered>, std::less<>>;  // calls may outlive main
  return *made;
}

Registered* Find(std::string_view digest) {
  const std::lock_guard<std::mutex> lock(modules_mutex);
  const auto found = Modules().find(digest);
  return found == Modules().end() ? nullptr : found->second.get();
}

ffi::Error Failed(const ecornn_error& error) {
  return ffi::Error(error.code == ECORNN_FAILED || error.code == ECORNN_MEMORY ? ffi::ErrorCode::kInternal
                                                                               : ffi::ErrorCode::kInvalidArgument,
                    error.message);
}

// Arguments: x, masks, first states, weights; of backward y, what was kept, dy, gradients of last states, and zeros whose
// memory the gradients of weights have. Results: y, last states, and of forward what is kept; of backward dx, gradients of
// first states, and of weights.
ffi::Error Invoke(DLDeviceType type, void* stream, int32_t number, std::string_view digest, int32_t entry, int32_t threads,
                  const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  Registered* module = Find(digest);
  if (!module) {
    return ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                      "the program calls a module that this process has not loaded: ecornn.jax.recurrent(ecornn.load(...))");
  }
  Tensors in({type, number}, args.size()), out({type, number}, rets.size());
  for (size_t n = 0; n < args.size(); ++n) {
    const auto buffer = args.get<ffi::AnyBuffer>(n);
    if (!buffer || !in.Add(*buffer)) return ffi::Error::InvalidArgument("an argument of another data type");
  }
  for (size_t n = 0; n < rets.size(); ++n) {
    auto buffer = rets.get<ffi::AnyBuffer>(n);
    if (!buffer || !out.Add(**buffer)) return ffi::Error::InvalidArgument("a result of another data type");
  }
  ecornn_error error{};
  const ecornn_api& api = *module->api();
  const ecornn_description* d = api.describe(&error);
  if (!d) return Failed(error);
  const size_t masks = static_cast<size_t>(d->lengths + d->resets), states = static_cast<size_t>(d->state_count),
               parameters = static_cast<size_t>(d->parameter_count);
  const size_t arguments = 1 + masks + states + parameters + (entry == kBackward ? 3 + states + parameters : 0);
  const size_t results = 1 + states + (entry == kForward ? 1 : entry == kBackward ? parameters : 0);
  if (args.size() != arguments || rets.size() != results) return ffi::Error::InvalidArgument("another number of arguments");

  ecornn_call call{};
  call.size = sizeof call;
  call.stream = stream;
  call.threads = threads;
  call.x = in.Next();
  if (d->lengths) call.lengths = in.Next();
  if (d->resets) call.resets = in.Next();
  const std::vector<DLTensor*> before = in.Next(d->state_count);
  call.state_in = before.data();
  std::vector<ecornn_named> weights, sums;
  for (int32_t n = 0; n < d->parameter_count; ++n) weights.push_back({d->parameters[n].name, in.Next()});

  ecornn_layer* layer = module->Take(weights, number, stream, &error);
  if (!layer) return Failed(error);
  const auto keep = [&](const DLTensor* kept) {
    call.kept = kept->data;
    call.kept_size = static_cast<size_t>(kept->shape[0]);
  };
  int32_t code;
  if (entry == kBackward) {
    call.y = in.Next();
    keep(in.Next());
    ecornn_gradients of{};
    of.size = sizeof of;
    of.dy = in.Next();
    const std::vector<DLTensor*> after = in.Next(d->state_count);
    of.dstate_out = after.data();
    of.dx = out.Next();
    const std::vector<DLTensor*> gradients = out.Next(d->state_count);
    of.dstate_in = gradients.data();
    for (const ecornn_named& weight : weights) sums.push_back({weight.name, out.Next()});
    of.weights = sums.data();
    of.weight_count = d->parameter_count;
    code = api.backward(layer, &call, &of, &error);
  } else {
    call.y = out.Next();
    const std::vector<DLTensor*> after = out.Next(d->state_count);
    call.state_out = after.data();
    if (entry == kForward) keep(out.Next());
    code = entry == kForward ? api.forward(layer, &call, &error) : api.run(layer, &call, &error);
  }
  module->Give(layer, number, stream);
  return code ? Failed(error) : ffi::Error::Success();
}

ffi::Error OnCpu(std::string_view digest, int32_t entry, int32_t threads, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return Invoke(kDLCPU, nullptr, 0, digest, entry, threads, args, rets);
}

ffi::Error OnCuda(void* stream, int32_t device, std::string_view digest, int32_t entry, int32_t, ffi::RemainingArgs args,
                  ffi::RemainingRets rets) {
  return Invoke(kDLCUDA, stream, device, digest, entry, 0, args, rets);
}

}  // namespace

#pragma GCC visibility push(default)
XLA_FFI_DEFINE_HANDLER_SYMBOL(ecornn_jax_cpu, OnCpu,
                              ffi::Ffi::Bind().Attr<std::string_view>("module").Attr<int32_t>("entry")
                                  .Attr<int32_t>("threads").RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(ecornn_jax_cuda, OnCuda,
                              ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::DeviceOrdinal>()
                                  .Attr<std::string_view>("module").Attr<int32_t>("entry").Attr<int32_t>("threads")
                                  .RemainingArgs().RemainingRets());
#pragma GCC visibility pop

// `api`: the module's table.
extern "C" __attribute__((visibility("default"))) void ecornn_jax_register(const char* digest, const ecornn_api* api) {
  const std::lock_guard<std::mutex> lock(modules_mutex);
  auto& place = Modules()[digest];
  if (!place) place = std::make_unique<Registered>(api);
}
