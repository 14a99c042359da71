// Host code of a CUDA module, the same for all: loads the cubins once per device, carries out the calls of an entry, and
// exports functions for device memory. What differs from module to module lies behind it in the file: host_cuda.h.
#include "host_cuda.h"

#include <alloca.h>
#include <pthread.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>

#include "cuda_driver.h"
#include "cuda_streams.h"

ecornn_blob ecornn_manifest, ecornn_c_tables;

// What the C interface calls, FUNCTIONS of c_tables.py; null where the module has none of it.
extern "C" {
using FunctionOfModule = int (*)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
extern __attribute__((visibility("hidden"))) FunctionOfModule ecornn_functions[8];
}

namespace ecornn {

static HostProgram program;
// What is wrong with the file, or null. The module is read when its library is loaded.
static const char* const unreadable = [] {
  const char* wrong = program.Read();
  for (int n = 0; n < 3; ++n)
    if (program.entries[n].pointers < 0) ecornn_functions[n] = nullptr;
  if (program.pack < 0) ecornn_functions[3] = nullptr;
  return wrong;
}();

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

static int images() { return static_cast<int>(program.images.size()); }
static int kernels() { return static_cast<int>(program.kernels.size()); }

static int load_image(State& state, int index) {
  char what[160];
  snprintf(what, sizeof what, "a module for %s on a GPU of compute capability %d.%d", program.arch, state.major, state.minor);
  ECORNN_CALL(what, cuModuleLoadData, &state.modules[index], program.images[static_cast<size_t>(index)]);
  return 0;
}

static int load_kernel(State& state, int index) {
  const Kernel& kernel = program.kernels[static_cast<size_t>(index)];
  Function& function = state.functions[index];
  ECORNN_CALL(kernel.name, cuModuleGetFunction, &function, state.modules[kernel.image], kernel.symbol);
  if (kernel.shared > 0)
    ECORNN_CALL(kernel.name, cuFuncSetAttribute, function, kFunctionMaxDynamicShared, static_cast<int>(kernel.shared));
  if (kernel.cluster > 8)
    ECORNN_CALL(kernel.name, cuFuncSetAttribute, function, kFunctionNonPortableCluster, 1);
  return 0;
}

// Of a state whose context is current; also where only some are loaded.
static void unload_kernels(State& state) {
  for (int i = 0; i < images(); ++i)
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
  state.modules = static_cast<Module*>(calloc(program.images.size(), sizeof(Module)));
  state.functions = static_cast<Function*>(calloc(program.kernels.size(), sizeof(Function)));
  int failed = state.modules && state.functions ? 0 : fail("MemoryError", "out of memory");
  for (int i = 0; !failed && i < images(); ++i) failed = load_image(state, i);
  for (int i = 0; !failed && i < kernels(); ++i) failed = load_kernel(state, i);
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
    snprintf(message, sizeof message, "device=%lld: expected 0 to %d",
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
    RelaxedCapture relaxed;
    destroy_lanes(state->lanes);
    unload_kernels(*state);
    driver.cuCtxPopCurrent(&before);
    driver.cuDevicePrimaryCtxRelease(state->device);
  }
}

// What is being carried out: the calls of an entry, or of a part of it that has scalars, pointers or a stream of its own.
struct Frame {
  const State& state;
  Stream stream;
  Pointer* p;  // p[i] is the memory of the buffer that the entry takes as its pointer i
  const int64_t existing;
  // Scalars that kernels take, SCALARS of host_cuda.py. t: the step of a loop; add: whether gradients are added to what is
  // there; of chunks T is the chunk's, first_step its first step, all_steps the call's T.
  struct Scalars {
    int32_t T, B, t, add, first_step, all_steps;
  } scalars;
};

enum Call : int64_t { kFill, kLaunch, kLoop, kRelay, kConcurrent, kWave, kChunks };  // CALLS of host_cuda.py

// A list of pairs: how many, and the pairs.
static const int64_t* past_pairs(const int64_t* pairs) { return pairs + 1 + 2 * pairs[0]; }

static int run(Frame& frame, const int64_t* begin, const int64_t* end);

static int launch_kernel(const State& state, int64_t kernel, const Shape& shape, Stream stream, void** arguments) {
  const LaunchConfig config{{shape.grid, 1, 1}, {shape.threads, 1, 1}, shape.shared,
                            stream,             shape.attributes,      shape.attribute_count};
  ECORNN_CALL(program.kernels[static_cast<size_t>(kernel)].name, cuLaunchKernelEx, &config, state.functions[kernel],
              arguments, nullptr);
  return 0;
}

// kernel, shape, how many buffers of which one must be there and these, how many arguments and these: a pointer, or -1
// minus the number of a scalar.
struct Launch {
  explicit Launch(const int64_t* words)
      : kernel(words[0]), shape(program.shapes[static_cast<size_t>(words[1])]), wanted(words + 2),
        given(words + 3 + words[2]) {}

  int64_t room() const { return given[0] + 1; }

  void Prepare(Frame& frame, void** arguments) const {
    auto* scalars = reinterpret_cast<int32_t*>(&frame.scalars);
    for (int64_t n = 0; n < given[0]; ++n) {
      const int64_t from = given[1 + n];
      arguments[n] = from < 0 ? static_cast<void*>(scalars - 1 - from) : static_cast<void*>(frame.p + from);
    }
    arguments[given[0]] = nullptr;
  }

  int Make(const Frame& frame, void** arguments) const {
    bool there = wanted[0] == 0;
    for (int64_t n = 0; n < wanted[0]; ++n) there = there || frame.p[wanted[1 + n]];
    return there ? launch_kernel(frame.state, kernel, shape, frame.stream, arguments) : 0;
  }

  const int64_t kernel;
  const Shape& shape;
  const int64_t *wanted, *given;
};

// The launches of all steps, and what comes `between` two. Arguments are prepared once: only the value of t, and where
// their pointers point, changes from step to step.
template <typename Between>
static int loop(Frame& frame, const int64_t* begin, const int64_t* end, Between between) {
  int64_t room = 0;
  for (const int64_t* at = begin; at < end; at += at[1]) room += Launch(at + 2).room();
  auto** const arguments = static_cast<void**>(alloca(sizeof(void*) * static_cast<size_t>(room)));
  void** free = arguments;
  for (const int64_t* at = begin; at < end; at += at[1]) {
    const Launch launch(at + 2);
    launch.Prepare(frame, free);
    free += launch.room();
  }
  int32_t& t = frame.scalars.t;
  for (t = 0; t < frame.scalars.T; ++t, between()) {
    free = arguments;
    for (const int64_t* at = begin; at < end; at += at[1]) {
      const Launch launch(at + 2);
      ECORNN_TRY(launch.Make(frame, free));
      free += launch.room();
    }
  }
  return 0;
}

// place, byte, bytes, bytes for each step, name
static int fill(const Frame& frame, const int64_t* words) {
  const int64_t bytes = words[2] + words[3] * frame.scalars.T;
  if (bytes > 0)
    ECORNN_CALL(program.names[static_cast<size_t>(words[4])], cuMemsetD8Async, frame.p[words[0]],
                static_cast<unsigned char>(words[1]), static_cast<size_t>(bytes), frame.stream);
  return 0;
}

// before, after, given, written, bytes of a row, the name of `given`, launches: two workspaces that change places from step
// to step. The first step finds the state where the caller has it; of a call of one step, whose state afterwards is in the
// same place, in a copy.
static int relay(Frame& frame, const int64_t* words, const int64_t* end) {
  Pointer &before = frame.p[words[0]], &after = frame.p[words[1]];
  const Pointer one = before, other = after, given = frame.p[words[2]], written = frame.p[words[3]];
  const Pointer size = static_cast<Pointer>(words[4] * frame.scalars.B);
  if (frame.scalars.T > 1 || given + size <= written || written + size <= given)
    before = given;
  else
    ECORNN_CALL(program.names[static_cast<size_t>(words[5])], cuMemcpyAsync, before, given, static_cast<size_t>(size),
                frame.stream);
  const int failed = loop(frame, words + 6, end, [&] {
    before = after;
    after = after == other ? one : other;
  });
  before = one, after = other;
  return failed;
}

// The pointers of a chunk: those of its first step, `moving` by bytes for each row of the batch, and those of states that
// are `handed` on, after the first chunk.
static void chunk_pointers(Pointer* own, const Pointer* all, const int64_t* moving, const int64_t* handed, int32_t first,
                           int32_t B, bool later) {
  memcpy(own, all, sizeof(Pointer) * static_cast<size_t>(program.most));
  for (int64_t n = 0; n < moving[0]; ++n)
    own[moving[1 + 2 * n]] += static_cast<Pointer>(moving[2 + 2 * n] * B * first);
  for (int64_t n = 0; later && n < handed[0]; ++n) own[handed[1 + 2 * n]] = own[handed[2 + 2 * n]];
}

static Pointer* room_for_pointers(void* memory) { return static_cast<Pointer*>(memory); }
#define ECORNN_POINTERS() room_for_pointers(alloca(sizeof(Pointer) * static_cast<size_t>(program.most + 1)))

// steps, reverse, moving, handed, pairs that are in place, calls
static int chunks(const Frame& frame, const int64_t* words, const int64_t* end) {
  const int64_t *moving = words + 2, *handed = past_pairs(moving), *places = past_pairs(handed);
  const int32_t all = frame.scalars.T, steps = static_cast<int32_t>(words[0]), last = (all - 1) / steps;
  Pointer* own = ECORNN_POINTERS();
  for (int32_t i = 0; i <= last; ++i) {
    Frame chunk = frame;
    auto& s = chunk.scalars;
    s.first_step = (words[1] ? last - i : i) * steps;
    s.all_steps = all;
    s.T = std::min(steps, all - s.first_step);
    chunk.p = own;
    chunk_pointers(own, frame.p, moving, handed, s.first_step, s.B, i > 0);
    for (int64_t n = 0; n < places[0]; ++n) {
      const int64_t workspace = places[1 + 2 * n], kept = places[2 + 2 * n];
      if (frame.p[workspace] == frame.p[kept]) own[workspace] = own[kept];
    }
    if (frame.existing >= 0 && i > 0) own[frame.existing] = s.add = 1;
    ECORNN_TRY(run(chunk, past_pairs(places), end));
  }
  return 0;
}

// Branches, each with its length before it, at the same time: after what the stream has been given before, and before what
// it is given next.
static int concurrent(const Frame& frame, const int64_t* words) {
  const int count = static_cast<int>(words[0]);
  LaneSet* set;
  ECORNN_TRY(find_lanes(&frame.state.lanes, &lock, frame.stream, &set));
  Lanes lanes(*set, count);
  ECORNN_TRY(lanes.enter());
  int failed = lanes.mark(0);
  for (int i = 1; !failed && i < count; ++i) failed = lanes.follow(i, 0);
  const int64_t* branch = words + 1;
  for (int i = 0; !failed && i < count; ++i) {
    const int64_t* next = branch + 1 + branch[0];
    Frame own = frame;
    own.stream = lanes[i];
    failed = run(own, branch + 1, next);
    branch = next;
  }
  return lanes.join(failed);
}

// The calls of a wave's layer for `steps` steps from `first` on: its length, moving, handed, calls.
static int run_chunk(const Frame& frame, const int64_t* layer, int32_t first, int32_t steps, Stream stream) {
  const int64_t *moving = layer + 1, *handed = past_pairs(moving);
  Frame own = frame;
  own.p = ECORNN_POINTERS();
  own.stream = stream;
  own.scalars.T = steps;
  chunk_pointers(own.p, frame.p, moving, handed, first, own.scalars.B, first > 0);
  return run(own, past_pairs(handed), layer + 1 + layer[0]);
}

// chunks at most, steps of each at least, layers
static int wave(const Frame& frame, const int64_t* words, const int64_t* end) {
  const int64_t T = frame.scalars.T, wanted = std::max((T - 1) / words[0] + 1, words[1]);
  const int64_t steps = (wanted + 7) / 8 * 8;  // 16 bytes
  const int last = static_cast<int>((T - 1) / steps);
  std::vector<const int64_t*> layers;
  for (const int64_t* layer = words + 2; layer < end; layer += 1 + layer[0]) layers.push_back(layer);
  const int count = static_cast<int>(layers.size());
  if (last == 0) {  // nothing to do at the same time
    for (const int64_t* layer : layers)
      ECORNN_TRY(run_chunk(frame, layer, 0, frame.scalars.T, frame.stream));
    return 0;
  }
  LaneSet* set;
  ECORNN_TRY(find_lanes(&frame.state.lanes, &lock, frame.stream, &set));
  Lanes lanes(*set, count);
  ECORNN_TRY(lanes.enter());
  int failed = 0;
  // On a diagonal the later layers come first: they follow the marks that the layers before made on the last one.
  for (int diagonal = 0; !failed && diagonal < last + count; ++diagonal)
    for (int i = diagonal < count ? diagonal : count - 1; !failed && i >= 0 && diagonal - i <= last; --i) {
      const int32_t first = static_cast<int32_t>((diagonal - i) * steps);
      const int32_t own = static_cast<int32_t>(std::min(steps, T - first));
      if (i > 0) failed = lanes.follow(i, i - 1);
      if (!failed) failed = run_chunk(frame, layers[static_cast<size_t>(i)], first, own, lanes[i]);
      if (!failed && i < count - 1) failed = lanes.mark(i);
    }
  return lanes.join(failed);
}

// Calls in order, each with its kind and its length before it.
static int run(Frame& frame, const int64_t* begin, const int64_t* end) {
  for (const int64_t* at = begin; at < end; at += at[1]) {
    const int64_t *words = at + 2, *next = at + at[1];
    switch (at[0]) {
      case kFill: ECORNN_TRY(fill(frame, words)); break;
      case kLaunch: {
        const Launch launch(words);
        auto** arguments = static_cast<void**>(alloca(sizeof(void*) * static_cast<size_t>(launch.room())));
        launch.Prepare(frame, arguments);
        ECORNN_TRY(launch.Make(frame, arguments));
        break;
      }
      case kLoop: ECORNN_TRY(loop(frame, words, next, [] {})); break;
      case kRelay: ECORNN_TRY(relay(frame, words, next)); break;
      case kConcurrent: ECORNN_TRY(concurrent(frame, words)); break;
      case kWave: ECORNN_TRY(wave(frame, words, next)); break;
      case kChunks: ECORNN_TRY(chunks(frame, words, next)); break;
      default: return fail("RuntimeError", "the module's file has a call that its code does not know");
    }
  }
  return 0;
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
  snprintf(message, sizeof message, "%s=%lld: expected 1 to %d", name,
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

static int enter(int number, const char* name, const void* arguments, int32_t num_args) {
  const EntryCalls& entry = program.entries[number];
  const TVMFFIAny* args = static_cast<const TVMFFIAny*>(arguments);
  char signature[64];
  snprintf(signature, sizeof signature, "%s(T, B, device, queue, *pointers)", name);
  if (unreadable) return fail("RuntimeError", unreadable);
  if (entry.pointers < 0) return fail("AttributeError", "the module was compiled without this entry");
  const size_t room = 4 + static_cast<size_t>(program.most);  // a wave copies as many
  int64_t* a = static_cast<int64_t*>(alloca(sizeof(int64_t) * room));
  memset(a, 0, sizeof(int64_t) * room);
  ECORNN_TRY(integers(signature, args, num_args, static_cast<int32_t>(4 + entry.pointers), a));
  ECORNN_USE(a[2]);
  ECORNN_TRY(check_size("T", a[0]));
  ECORNN_TRY(check_size("B", a[1]));
  Frame frame{*state, stream_of(a[3]), reinterpret_cast<Pointer*>(a + 4), entry.existing, {}};
  frame.scalars.T = static_cast<int32_t>(a[0]);
  frame.scalars.B = static_cast<int32_t>(a[1]);
  frame.scalars.add = entry.existing >= 0 && frame.p[entry.existing] != 0;
  return run(frame, entry.begin, entry.end);
}

constexpr int kPackGiven = 8, kPackParameters = 128;  // arguments before the parameters; those that the kernel takes
constexpr int kPackThreads = 256, kPackWarps = kPackThreads / 32;  // of a block; a warp does one of the works

static int pack(const void* arguments, int32_t num_args) {
  if (program.pack < 0) return fail("AttributeError", "the module has no kernel that packs weights");
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
  return launch_kernel(*state, program.pack, shape, stream_of(a[1]), given);
}

}  // namespace ecornn

using namespace ecornn;

#define ECORNN_ENTRY(name, number) \
  ECORNN_EXPORT(name) { return enter(number, #name, args, num_args); }

ECORNN_ENTRY(run, 0)
ECORNN_ENTRY(forward, 1)
ECORNN_ENTRY(backward, 2)

ECORNN_EXPORT(pack) { return pack(args, num_args); }

ECORNN_EXPORT(manifest) {
  ECORNN_TRY(integers("manifest()", args, num_args, 0, nullptr));
  if (unreadable) return fail("RuntimeError", unreadable);
  TVMFFIByteArray text{reinterpret_cast<const char*>(ecornn_manifest.data), static_cast<size_t>(ecornn_manifest.size)};
  return TVMFFIStringFromByteArray(&text, result);
}

ECORNN_EXPORT(alloc) {
  ECORNN_ENTER("alloc(device, nbytes)", 2, a[0]);
  RelaxedCapture relaxed;
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
  RelaxedCapture relaxed;
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

FunctionOfModule ecornn_functions[8] = {__tvm_ffi_run,   __tvm_ffi_forward, __tvm_ffi_backward, __tvm_ffi_pack,
                                        __tvm_ffi_alloc, __tvm_ffi_free,    __tvm_ffi_copy,     __tvm_ffi_synchronize};
