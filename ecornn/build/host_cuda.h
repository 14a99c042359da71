// What host_cuda.cc and the generated program.cc know of each other. It includes little: program.cc is compiled for
// every candidate of a search.
#pragma once
#include <stdint.h>

namespace ecornn {

using Pointer = uint64_t;  // CUdeviceptr
using Stream = struct StreamHandle*;
struct State;  // what a module keeps for one device

enum : int {
  kLaunchCooperative = 2,  // CU_LAUNCH_ATTRIBUTE_COOPERATIVE
  kLaunchCluster = 4,      // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
  kLaunchEarly = 6,        // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
};

// CUlaunchAttribute: an id, padding to 8 bytes, and a union of 64 bytes.
struct LaunchAttribute {
  int id;
  int padding;
  unsigned value[16];
};
static_assert(sizeof(LaunchAttribute) == 72, "CUlaunchAttribute");

struct Kernel {
  const char* name;
  const char* symbol;
  int image;    // number of the cubin that has it
  int shared;   // the most dynamic shared memory of any of its launches, bytes
  int cluster;  // the largest cluster, blocks
};

struct Shape {
  unsigned grid, threads, shared;
  unsigned attribute_count;
  LaunchAttribute attributes[3];
};

// Of program.cc.
extern const char kArch[];
extern const int kMostPointers, kKernelCount, kImageCount;  // kMostPointers: that an entry takes
extern const unsigned char* const kImages[];
extern const Kernel kKernels[];
// Calls in order; p[i] is the memory of the buffer that the entry takes as its pointer i.
using Section = int (*)(const State& state, int32_t T, int32_t B, Stream stream, Pointer* p);

// A layer of a wave: the calls of a chunk, and which of their pointers change with it. Both lists end with buffer -1.
struct Moving {
  int buffer;
  int64_t bytes;  // of a step, for each row of the batch
};
struct Handed {
  int first, then;  // buffers: a state's input of the first chunk, and of all others
};
struct WaveLayer {
  Section section;
  const Moving* moving;
  const Handed* handed;
};

// Of host_cuda.cc; 0, or -1 with the error set for tvm-ffi.
// An entry of the module, called with its arguments (TVMFFIAny).
int enter(const char* signature, Section calls, int pointers, const void* arguments, int32_t count);
int launch(const State& state, int kernel, const Shape& shape, Stream stream, void** arguments);
int fill(Pointer pointer, unsigned char byte, int64_t bytes, Stream stream, const char* name);
// Where the first step of T finds a state: `given`, or a copy in *workspace, which becomes that.
int taken(Pointer* workspace, Pointer given, Pointer written, int64_t bytes, int32_t T, Stream stream, const char* name);
// At the same time: after what the stream has been given before, and before what it is given next.
int beside(const State& state, int count, const Section* sections, int32_t T, int32_t B, Stream stream, Pointer* p);
int wave(const State& state, int count, const WaveLayer* layers, int chunks, int least, int32_t T, int32_t B,
         Stream stream, Pointer* p);

// Packs weights by this kernel, of pack_weights.cu; called with its arguments (TVMFFIAny).
int pack(int kernel, const void* arguments, int32_t count);

// The pointers of a chunk, as many as the entry takes at most: those of its first step and, `later`, of states handed on.
void chunk_pointers(Pointer* own, const Pointer* all, const Moving* moving, const Handed* handed, int32_t first,
                    int32_t B, bool later);

#define ECORNN_TRY(expression)     \
  do {                             \
    if ((expression)) return -1;   \
  } while (0)

// Exports name(T, B, device, queue, *pointers), which makes the calls of the section name_calls.
#define ECORNN_ENTRY(name, pointers)                                                                        \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name(void*, const void* arguments,      \
                                                                         int32_t count, void*) {            \
    return enter(#name "(T, B, device, queue, *pointers)", name##_calls, pointers, arguments, count);       \
  }

// Exports pack(device, queue, works, jobs, sources, places, count, type, *parameters).
#define ECORNN_PACK(kernel)                                                                                   \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_pack(void*, const void* arguments,          \
                                                                       int32_t count, void*) {                \
    return pack(kernel, arguments, count);                                                                    \
  }

}  // namespace ecornn
