// Host code of a CUDA module, the same for all: loads the embedded cubins once per device and exports functions
// for device memory. What differs from module to module is program.cc, written by host_cuda.py, with the entries.
#include "host_cuda.h"

#include <alloca.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "cuda_driver.h"
#include "cuda_streams.h"

extern "C" const unsigned char ecornn_manifest[];
extern "C" const unsigned long long ecornn_manifest_size;

namespace ecornn {

constexpr int kMaxDevices = 64;

// What a module keeps for one device; made once, never changed but for the lanes that are added.
struct State {
  Context context;
  int device, major, minor;
  Module* modules;  // one for each cubin
  Function* functions;
  mutable LaneSet* lanes;  // under `lock`
};

static State storage[kMaxDevices];
static std::atomic<State*> states[kMaxDevices];
static std::atomic<bool> driver_ready;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int load_image(State& state, int index) {
  char what[160];
  snprintf(what, sizeof what, "a module for %s on a GPU of compute capability %d.%d", kArch, state.major, state.minor);
  ECORNN_CALL(what, cuModuleLoadData, &state.modules[index], kImages[index]);
  return 0;
}

static int load_kernel(State& state, int index) {
  const Kernel& kernel = kKernels[index];
  Function& function = state.functions[index];
  ECORNN_CALL(kernel.name, cuModuleGetFunction, &function, state.modules[kernel.image], kernel.symbol);
  if (kernel.shared > 0)
    ECORNN_CALL(kernel.name, cuFuncSetAttribute, function, kFunctionMaxDynamicShared, kernel.shared);
  if (kernel.cluster > 8)
    ECORNN_CALL(kernel.name, cuFuncSetAttribute, function, kFunctionNonPortableCluster, 1);
  return 0;
}

// Of a state whose context is current; also where only some are loaded.
static void unload_kernels(State& state) {
  for (int i = 0; i < kImageCount; ++i)
    if (state.modules[i]) driver.cuModuleUnload(state.modules[i]);
  free(state.modules);
  free(state.functions);
}

static int load_kernels(State& state) {
  RelaxedCapture relaxed;
  Current current;
  ECORNN_TRY(current.enter(state.context));
  ECORNN_CALL("", cuDeviceGetAttribute, &state.major, kDeviceCapabilityMajor, state.device);
  ECORNN_CALL("", cuDeviceGetAttribute, &state.minor, kDeviceCapabilityMinor, state.device);
  state.modules = static_cast<Module*>(calloc(kImageCount, sizeof(Module)));
  state.functions = static_cast<Function*>(calloc(kKernelCount, sizeof(Function)));
  int failed = state.modules && state.functions ? 0 : fail("MemoryError", "out of memory");
  for (int i = 0; !failed && i < kImageCount; ++i) failed = load_image(state, i);
  for (int i = 0; !failed && i < kKernelCount; ++i) failed = load_kernel(state, i);
  if (failed) unload_kernels(state);
  return failed;
}

static int make_state(int64_t device, State** out) {
  Locked locked(&lock);
  if ((*out = states[device].load(std::memory_order_acquire))) return 0;
  if (!driver_ready.load(std::memory_order_relaxed)) {
    ECORNN_TRY(open_driver());
    driver_ready.store(true, std::memory_order_relaxed);
  }
  State& state = storage[device];
  ECORNN_CALL("", cuDeviceGet, &state.device, static_cast<int>(device));
  ECORNN_CALL("", cuDevicePrimaryCtxRetain, &state.context, state.device);
  if (load_kernels(state)) {
    driver.cuDevicePrimaryCtxRelease(state.device);
    return -1;
  }
  states[device].store(*out = &state, std::memory_order_release);
  return 0;
}

static int get_state(int64_t device, State** out) {
  if (device < 0 || device >= kMaxDevices) {
    char message[96];
    snprintf(message, sizeof message, "device=%lld is not allowed; expected 0 to %d",
             static_cast<long long>(device), kMaxDevices - 1);
    return fail("ValueError", message);
  }
  *out = states[device].load(std::memory_order_acquire);
  return *out ? 0 : make_state(device, out);
}

// Where the library is unloaded; at the end of a process the driver is gone by then and says so.
__attribute__((destructor)) static void unload() {
  for (auto& slot : states) {
    State* state = slot.load(std::memory_order_acquire);
    if (!state || driver.cuCtxPushCurrent(state->context)) continue;
    Context before;
    destroy_lanes(state->lanes);
    unload_kernels(*state);
    driver.cuCtxPopCurrent(&before);
    driver.cuDevicePrimaryCtxRelease(state->device);
  }
}

int launch(const State& state, int kernel, const Shape& shape, Stream stream, void** arguments) {
  LaunchConfig config{{shape.grid, 1, 1}, {shape.threads, 1, 1}, shape.shared,
                      stream,             shape.attributes,      shape.attribute_count};
  ECORNN_CALL(kKernels[kernel].name, cuLaunchKernelEx, &config, state.functions[kernel], arguments,
              nullptr);
  return 0;
}

int fill(Pointer pointer, unsigned char byte, int64_t bytes, Stream stream, const char* name) {
  if (bytes > 0) ECORNN_CALL(name, cuMemsetD8Async, pointer, byte, static_cast<size_t>(bytes), stream);
  return 0;
}

int taken(Pointer* workspace, Pointer given, Pointer written, int64_t bytes, int32_t T, Stream stream,
          const char* name) {
  const Pointer size = static_cast<Pointer>(bytes);
  if (T > 1 || given + size <= written || written + size <= given)
    *workspace = given;
  else
    ECORNN_CALL(name, cuMemcpyAsync, *workspace, given, static_cast<size_t>(bytes), stream);
  return 0;
}

int beside(const State& state, int count, const Section* sections, int32_t T, int32_t B, Stream stream, Pointer* p) {
  LaneSet* set;
  ECORNN_TRY(find_lanes(&state.lanes, &lock, stream, &set));
  Lanes lanes(*set, count);
  ECORNN_TRY(lanes.enter());
  int failed = lanes.mark(0);
  for (int i = 1; !failed && i < count; ++i) failed = lanes.follow(i, 0);
  for (int i = 0; !failed && i < count; ++i) failed = sections[i](state, T, B, lanes[i], p);
  return lanes.join(failed);
}

void chunk_pointers(Pointer* own, const Pointer* all, const Moving* moving, const Handed* handed, int32_t first,
                    int32_t B, bool later) {
  memcpy(own, all, sizeof(Pointer) * kMostPointers);
  for (const Moving* m = moving; m->buffer >= 0; ++m) own[m->buffer] += m->bytes * B * first;
  if (later)
    for (const Handed* h = handed; h->first >= 0; ++h) own[h->first] = own[h->then];
}

// The calls of a layer for `steps` steps from `first` on.
static int run_chunk(const State& state, const WaveLayer& layer, int32_t first, int32_t steps, int32_t B, Stream stream,
                     const Pointer* p) {
  Pointer* own = static_cast<Pointer*>(alloca(sizeof(Pointer) * kMostPointers));
  chunk_pointers(own, p, layer.moving, layer.handed, first, B, first > 0);
  return layer.section(state, steps, B, stream, own);
}

int wave(const State& state, int count, const WaveLayer* layers, int chunks, int least, int32_t T, int32_t B,
         Stream stream, Pointer* p) {
  const int64_t wanted = (T - 1) / chunks + 1, steps = ((wanted > least ? wanted : least) + 7) / 8 * 8;  // 16 bytes
  const int last = static_cast<int>((T - 1) / steps);
  if (last == 0) {  // nothing to do at the same time
    for (int i = 0; i < count; ++i) ECORNN_TRY(layers[i].section(state, T, B, stream, p));
    return 0;
  }
  LaneSet* set;
  ECORNN_TRY(find_lanes(&state.lanes, &lock, stream, &set));
  Lanes lanes(*set, count);
  ECORNN_TRY(lanes.enter());
  int failed = 0;
  // On a diagonal the later layers come first: they follow the marks that the layers before made on the last one.
  for (int diagonal = 0; !failed && diagonal < last + count; ++diagonal)
    for (int i = diagonal < count ? diagonal : count - 1; !failed && i >= 0 && diagonal - i <= last; --i) {
      const int32_t first = static_cast<int32_t>((diagonal - i) * steps), left = T - first;
      const int32_t own = left < steps ? left : static_cast<int32_t>(steps);
      if (i > 0) failed = lanes.follow(i, i - 1);
      if (!failed) failed = run_chunk(state, layers[i], first, own, B, lanes[i], p);
      if (!failed && i < count - 1) failed = lanes.mark(i);
    }
  return lanes.join(failed);
}

// Integers and opaque pointers are both passed in 64 bits.
static int integers(const char* signature, const TVMFFIAny* args, int32_t given, int32_t wanted,
                    int64_t* out) {
  char message[256];
  if (given != wanted) {
    snprintf(message, sizeof message, "%s takes %d arguments, not %d", signature, wanted, given);
    return fail("TypeError", message);
  }
  for (int32_t i = 0; i < given; ++i) {
    if (args[i].type_index != kTVMFFIInt && args[i].type_index != kTVMFFIOpaquePtr) {
      snprintf(message, sizeof message, "argument %d of %s must be an integer", i, signature);
      return fail("TypeError", message);
    }
    out[i] = args[i].v_int64;
  }
  return 0;
}

static int check_size(const char* name, int64_t value) {
  if (value >= 1 && value <= INT32_MAX) return 0;
  char message[96];
  snprintf(message, sizeof message, "%s=%lld is not allowed; expected 1 to %d", name,
           static_cast<long long>(value), INT32_MAX);
  return fail("ValueError", message);
}

static Stream stream_of(int64_t queue) { return reinterpret_cast<Stream>(queue); }

}  // namespace ecornn

// The device's state, and its context made current.
#define ECORNN_USE(device)               \
  State* state;                          \
  ECORNN_TRY(get_state(device, &state)); \
  Current current;                       \
  ECORNN_TRY(current.enter(state->context))

// The integers `a` of a call besides.
#define ECORNN_ENTER(signature, count, device)               \
  int64_t a[count];                                          \
  ECORNN_TRY(integers(signature, args, num_args, count, a)); \
  ECORNN_USE(device)

#define ECORNN_EXPORT(name)                                                                       \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t num_args, \
                                                     TVMFFIAny* result)

namespace ecornn {

int enter(const char* signature, Section calls, int pointers, const void* arguments, int32_t num_args) {
  const TVMFFIAny* args = static_cast<const TVMFFIAny*>(arguments);
  int64_t* a = static_cast<int64_t*>(alloca(sizeof(int64_t) * (4 + kMostPointers)));  // a wave copies as many
  memset(a, 0, sizeof(int64_t) * (4 + kMostPointers));
  ECORNN_TRY(integers(signature, args, num_args, 4 + pointers, a));
  ECORNN_USE(a[2]);
  ECORNN_TRY(check_size("T", a[0]));
  ECORNN_TRY(check_size("B", a[1]));
  return calls(*state, static_cast<int32_t>(a[0]), static_cast<int32_t>(a[1]), stream_of(a[3]),
               reinterpret_cast<Pointer*>(a + 4));
}

constexpr int kPackGiven = 8, kPackParameters = 128;  // arguments before the parameters; those that the kernel takes
constexpr int kPackThreads = 256, kPackWarps = kPackThreads / 32;  // of a block; a warp does one of the works

int pack(int kernel, const void* arguments, int32_t num_args) {
  const char* signature = "pack(device, queue, works, jobs, sources, places, count, type, *parameters)";
  int64_t a[kPackGiven + kPackParameters] = {};
  if (num_args < kPackGiven || num_args > kPackGiven + kPackParameters)
    return fail("TypeError", "pack takes 8 arguments, and 128 parameters at most");
  ECORNN_TRY(integers(signature, static_cast<const TVMFFIAny*>(arguments), num_args, num_args, a));
  ECORNN_USE(a[0]);
  ECORNN_TRY(check_size("count", a[6]));
  int32_t count = static_cast<int32_t>(a[6]), type = static_cast<int32_t>(a[7]);
  const Shape shape = {static_cast<unsigned>((count - 1) / kPackWarps + 1), kPackThreads, 0, 0, {}};
  void* given[] = {&a[2], &a[3], &a[4], &a[5], &count, &type, &a[kPackGiven], nullptr};
  return launch(*state, kernel, shape, stream_of(a[1]), given);
}

}  // namespace ecornn

using namespace ecornn;

ECORNN_EXPORT(manifest) {
  ECORNN_TRY(integers("manifest()", args, num_args, 0, nullptr));
  TVMFFIByteArray text{reinterpret_cast<const char*>(ecornn_manifest),
                       static_cast<size_t>(ecornn_manifest_size)};
  return TVMFFIStringFromByteArray(&text, result);
}

ECORNN_EXPORT(alloc) {
  ECORNN_ENTER("alloc(device, nbytes)", 2, a[0]);
  Pointer pointer = 0;
  char what[48];
  snprintf(what, sizeof what, "%lld bytes", static_cast<long long>(a[1]));
  if (a[1] != 0) ECORNN_CALL(what, cuMemAlloc, &pointer, static_cast<size_t>(a[1]));
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = static_cast<int64_t>(pointer);
  return 0;
}

ECORNN_EXPORT(free) {
  (void)result;
  ECORNN_ENTER("free(device, pointer)", 2, a[0]);
  if (a[1] != 0) ECORNN_CALL("", cuMemFree, static_cast<Pointer>(a[1]));
  return 0;
}

ECORNN_EXPORT(copy) {
  (void)result;
  ECORNN_ENTER("copy(device, to, from, nbytes, queue)", 5, a[0]);
  if (a[3] != 0)
    ECORNN_CALL("", cuMemcpyAsync, static_cast<Pointer>(a[1]), static_cast<Pointer>(a[2]),
                static_cast<size_t>(a[3]), stream_of(a[4]));
  return 0;
}

ECORNN_EXPORT(synchronize) {
  (void)result;
  ECORNN_ENTER("synchronize(device, queue)", 2, a[0]);
  ECORNN_CALL("", cuStreamSynchronize, stream_of(a[1]));
  return 0;
}
