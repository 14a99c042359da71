// The C interface of a module, ecornn.h: the same code for all modules, which reads c_tables.py's tables.
#include "ecornn.h"

#include <exception>
#include <new>

#include "c_call.h"
#include "c_layer.h"
#include "c_tables.h"
#include "ecornn_blob.h"

namespace ecornn_c {
namespace {

const Tables& TheTables() {
  static const Tables made(ecornn_c_tables.data, reinterpret_cast<const char*>(ecornn_manifest.data));
  return made;
}

// Runs `body`, and makes errors of exceptions.
template <typename Body>
int32_t Guarded(const Failure& fail, Body body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return fail(ECORNN_MEMORY, "there is not enough memory");
  } catch (const std::exception& error) {
    return fail(ECORNN_FAILED, "%s", error.what());
  }
}

int32_t Packs(const Failure& fail) {
  return ecornn_c_tables.size ? ECORNN_OK : fail(ECORNN_UNSUPPORTED, "the module packs weights in a way that is not known");
}

int32_t IsLayer(const Failure& fail) {
  if (const int32_t code = Packs(fail)) return code;
  return TheTables().layer ? ECORNN_OK : fail(ECORNN_UNSUPPORTED, "the module's entries are not those of a layer");
}

const ecornn_description* Describe(ecornn_error* error) {
  const Failure fail(error);
  const ecornn_description* found = nullptr;
  Guarded(fail, [&] {
    if (const int32_t code = IsLayer(fail)) return code;
    found = &TheTables().description;
    return int32_t{ECORNN_OK};
  });
  return found;
}

bool Floating(DLDataType type) {
  const bool real = type.code == kDLFloat && (type.bits == 16 || type.bits == 32 || type.bits == 64);
  return type.lanes == 1 && (real || (type.code == kDLBfloat && type.bits == 16));
}

// Weights of a caller in the parameters' order.
class Weights {
 public:
  int32_t Read(const Failure& fail, const Tables& tables, const ecornn_named* given, int32_t count, int32_t device) {
    if (count < 0 || (count && !given)) return fail(ECORNN_ARGUMENT, "weights is NULL");
    for (int32_t n = 0; n < count; ++n) {
      const char* name = given[n].name;
      if (!name || !given[n].tensor) return fail(ECORNN_ARGUMENT, "weights[%d] has no name or no tensor", n);
      const bool known = std::any_of(tables.parameters.begin(), tables.parameters.end(),
                                     [&](const ecornn_parameter& p) { return !strcmp(p.name, name); });
      if (!known) return fail(ECORNN_WEIGHTS, "weights: %s is no parameter of %s", name, tables.description.cell);
    }
    for (size_t n = 0; n < tables.parameters.size(); ++n) {
      const ecornn_parameter& p = tables.parameters[n];
      const auto found = std::find_if(given, given + count, [&](const ecornn_named& one) { return !strcmp(one.name, p.name); });
      if (found == given + count) return fail(ECORNN_WEIGHTS, "weights: %s is missing", p.name);
      const DLTensor* tensor = found->tensor;
      if (const int32_t code = Fits(fail, p, *tensor)) return code;
      if (tensor->device.device_type == kDLCUDA) {
        if (!tables.cuda() || tensor->device.device_id != device) {
          return fail(ECORNN_DEVICE, "%s is on GPU %d, where the layer does not run", p.name, tensor->device.device_id);
        }
      } else if (tensor->device.device_type != kDLCPU && tensor->device.device_type != kDLCUDAHost) {
        return fail(ECORNN_DEVICE, "%s is neither on the host nor on the layer's GPU", p.name);
      }
      weights_.push_back({tensor, tables.gates[n]});
    }
    return ECORNN_OK;
  }

  // Packs them in a layer: where they lie, by the module's kernel on the stream, or else on the host.
  int32_t Pack(const Failure& fail, Layer* layer, void* stream) {
    if (layer->PacksThere(weights_)) return layer->PackThere(fail, weights_, stream);
    for (size_t n = 0; n < weights_.size(); ++n) {
      if (weights_[n].tensor->device.device_type != kDLCUDA) continue;
      const ecornn_parameter& p = layer->tables.parameters[n];
      if (const int32_t code = Fetch(fail, p, &weights_[n].tensor, layer->device, stream)) return code;
    }
    return layer->Pack(fail, weights_, stream);
  }

 private:
  static int32_t Fits(const Failure& fail, const ecornn_parameter& p, const DLTensor& t) {
    char shape[96], wanted[96], type[32];
    if (t.ndim != p.ndim || !std::equal(p.shape, p.shape + p.ndim, t.shape)) {
      return fail(ECORNN_SHAPE, "%s has shape %s; expected %s", p.name, ShapeOf(t.shape, t.ndim, shape),
                  ShapeOf(p.shape, p.ndim, wanted));
    }
    if (!Floating(t.dtype)) {
      return fail(ECORNN_DTYPE, "%s is of %s; expected float16, bfloat16, float32 or float64", p.name,
                  NameOf(t.dtype, type));
    }
    return t.data ? ECORNN_OK : fail(ECORNN_ARGUMENT, "%s has no memory", p.name);
  }

  // To the host.
  int32_t Fetch(const Failure& fail, const ecornn_parameter& p, const DLTensor** tensor, int32_t device, void* stream) {
    if (!Contiguous(**tensor)) return fail(ECORNN_LAYOUT, "%s is not contiguous, on a GPU", p.name);
    const int64_t bytes = p.shape[0] * (p.ndim > 1 ? p.shape[1] : 1) * ((*tensor)->dtype.bits / 8);
    copies_.emplace_back(new std::vector<char>(static_cast<size_t>(bytes)));
    TVMFFIAny none{};
    if (const int32_t code = Call(fail, kCopy, "a copy", &none, device, Address(copies_.back()->data()),
                                  Address(DataOf(**tensor)), bytes, Address(stream))) return code;
    if (const int32_t code = Call(fail, kSynchronize, "a copy", &none, device, Address(stream))) return code;
    tensors_.emplace_back(new DLTensor(**tensor));
    *tensors_.back() = {copies_.back()->data(), {kDLCPU, 0}, p.ndim, (*tensor)->dtype, (*tensor)->shape, nullptr, 0};
    *tensor = tensors_.back().get();
    return ECORNN_OK;
  }

  std::vector<Weight> weights_;
  std::vector<std::unique_ptr<std::vector<char>>> copies_;
  std::vector<std::unique_ptr<DLTensor>> tensors_;
};

int32_t Bind(const ecornn_named* weights, int32_t count, const ecornn_bind_options* options, ecornn_layer** layer,
             ecornn_error* error);
int32_t Repack(ecornn_layer* layer, const ecornn_named* weights, int32_t count, void* stream, ecornn_error* error);

void Release(ecornn_layer* layer) { delete static_cast<Layer*>(layer); }

int64_t WorkspaceSize(const ecornn_layer* layer, int64_t steps, int64_t rows) {
  const Tables& tables = static_cast<const Layer*>(layer)->tables;
  int64_t most = 0;
  for (const Name entry : {kRun, kForward, kBackward}) {
    most = std::max(most, Invocation::WorkspaceBytes(tables, entry, steps, rows));
  }
  return most;
}

int64_t KeptSize(const ecornn_layer* layer, int64_t steps, int64_t batch) {
  const Tables& tables = static_cast<const Layer*>(layer)->tables;
  int64_t total = 0;
  for (const Kept& kept : tables.kept) total += Aligned(Invocation::KeptBytes(tables, kept, steps, batch));
  return total;
}

int32_t Invoke(ecornn_layer* layer, Name entry, const ecornn_call* call, const ecornn_gradients* gradients,
               ecornn_error* error) {
  const Failure fail(error);
  if (!layer) return fail(ECORNN_ARGUMENT, "layer is NULL");
  if (!ecornn_functions[entry]) return fail(ECORNN_UNSUPPORTED, "the module was compiled without training");
  if (static_cast<Layer*>(layer)->arguments[entry].empty()) return fail(ECORNN_UNSUPPORTED, "the layer only packs");
  ecornn_call room;
  ecornn_gradients room_of_gradients;
  if (const int32_t code = Known(fail, call, "ecornn_call", &room, &call)) return code;
  if (entry == kBackward) {
    if (const int32_t code = Known(fail, gradients, "ecornn_gradients", &room_of_gradients, &gradients)) return code;
  }
  return Guarded(fail, [&] { return Invocation(*static_cast<Layer*>(layer), entry, *call, gradients, fail).Run(); });
}

int32_t Run(ecornn_layer* layer, const ecornn_call* call, ecornn_error* error) {
  return Invoke(layer, kRun, call, nullptr, error);
}

int32_t Forward(ecornn_layer* layer, const ecornn_call* call, ecornn_error* error) {
  return Invoke(layer, kForward, call, nullptr, error);
}

int32_t Backward(ecornn_layer* layer, const ecornn_call* call, const ecornn_gradients* gradients, ecornn_error* error) {
  return Invoke(layer, kBackward, call, gradients, error);
}

const int64_t* Packed(const ecornn_layer* layer) { return static_cast<const Layer*>(layer)->addresses.data(); }

int32_t PackAt(ecornn_layer* layer, const int64_t* weights, DLDataType type, const uint8_t* changed, int32_t parts,
               void* stream, ecornn_error* error) {
  const Failure fail(error);
  return Guarded(fail, [&] { return static_cast<Layer*>(layer)->PackAt(fail, weights, type, changed, parts, stream); });
}

constexpr ecornn_api kApi{ECORNN_ABI_VERSION, sizeof(ecornn_api), Describe, Bind,    Repack,   Release, WorkspaceSize,
                          KeptSize,           Run,                Forward,  Backward, Packed, PackAt};

int32_t Bind(const ecornn_named* weights, int32_t count, const ecornn_bind_options* options, ecornn_layer** layer,
             ecornn_error* error) {
  const Failure fail(error);
  if (!layer) return fail(ECORNN_ARGUMENT, "layer is NULL");
  *layer = nullptr;
  return Guarded(fail, [&]() -> int32_t {
    if (const int32_t code = Packs(fail)) return code;
    ecornn_bind_options room{};
    const ecornn_bind_options* given = &room;
    if (options) {
      if (const int32_t code = Known(fail, options, "ecornn_bind_options", &room, &given)) return code;
    }
    const ecornn_bind_options& known = *given;
    const bool only_packs = known.reserve == -1;
    if (const int32_t code = only_packs ? 0 : IsLayer(fail)) return code;
    const Tables& tables = TheTables();
    if (known.threads < 0 || known.threads > 1024) {
      return fail(ECORNN_ARGUMENT, "threads is %d; expected 1 to 1024, or 0 for one", known.threads);
    }
    if (known.device < 0 || (known.device && !tables.cuda())) {
      return fail(ECORNN_DEVICE, "device is %d; expected %s", known.device, tables.cuda() ? "a GPU's number" : "0");
    }
    const int64_t reserve = known.reserve ? known.reserve : 1;
    if (!only_packs && (reserve < 0 || reserve > tables.description.longest)) {
      return fail(ECORNN_ARGUMENT, "reserve is %" PRId64 "; expected 0 to %" PRId64, reserve, tables.description.longest);
    }
    if (const int32_t code = CheckHost(fail, tables)) return code;
    Weights read;
    if (const int32_t code = read.Read(fail, tables, weights, count, known.device)) return code;
    auto made = std::make_unique<Layer>(tables, &kApi, known.device, std::max(1, known.threads));
    if (const int32_t code = read.Pack(fail, made.get(), known.stream)) return code;
    for (const auto& memory : made->packed) made->addresses.push_back(memory->at());
    if (only_packs) {
      *layer = made.release();
      return ECORNN_OK;
    }
    if (const int32_t code = made->Prepare(fail)) return code;
    Workspace* workspace = nullptr;
    if (const int32_t code = Invocation::MakeWorkspace(fail, *made, reserve, tables.description.batch, nullptr, &workspace))
      return code;
    made->idle.Give(workspace);
    *layer = made.release();
    return ECORNN_OK;
  });
}

int32_t Repack(ecornn_layer* layer, const ecornn_named* weights, int32_t count, void* stream, ecornn_error* error) {
  const Failure fail(error);
  if (!layer) return fail(ECORNN_ARGUMENT, "layer is NULL");
  return Guarded(fail, [&]() -> int32_t {
    auto* own = static_cast<Layer*>(layer);
    Weights read;
    if (const int32_t code = read.Read(fail, own->tables, weights, count, own->device)) return code;
    return read.Pack(fail, own, stream);
  });
}

}  // namespace
}  // namespace ecornn_c

extern "C" __attribute__((visibility("default"))) const ecornn_api* ecornn_module_api(int32_t version) {
  return version == ECORNN_ABI_VERSION ? &ecornn_c::kApi : nullptr;
}
