// The part of the CUDA driver API that a module calls.
//
// Declared here, so that no CUDA header is needed to build a module, and opened at run time, so that
// a module loads on a machine without a driver. Every function that can fail returns 0, or -1 with the
// error set for tvm-ffi.
#pragma once
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <tvm/ffi/c_api.h>

#include "host_cuda.h"

namespace ecornn {

using Result = int;  // CUresult
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Event = struct EventHandle*;

enum : int {
  kFunctionMaxDynamicShared = 8,       // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
  kFunctionNonPortableCluster = 14,    // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
  kDeviceCapabilityMajor = 75,         // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
  kDeviceCapabilityMinor = 76,         // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
  kCaptureRelaxed = 2,                 // CU_STREAM_CAPTURE_MODE_RELAXED
  kStreamNonBlocking = 1,              // CU_STREAM_NON_BLOCKING
  kEventDisableTiming = 2,             // CU_EVENT_DISABLE_TIMING
};

// CUlaunchConfig
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared;
  Stream stream;
  const LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56, "CUlaunchConfig");

// X(name, symbol, parameters): the newest ABI of a symbol that all drivers of the toolkit have.
#define ECORNN_DRIVER(X)                                                                            \
  X(cuInit, "cuInit", (unsigned))                                                                   \
  X(cuGetErrorName, "cuGetErrorName", (Result, const char**))                                       \
  X(cuGetErrorString, "cuGetErrorString", (Result, const char**))                                   \
  X(cuDeviceGet, "cuDeviceGet", (int*, int))                                                        \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, int))                                 \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (Context*, int))                          \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int))                               \
  X(cuCtxGetCurrent, "cuCtxGetCurrent", (Context*))                                                 \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (Context))                                             \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (Context*))                                              \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (int*))                 \
  X(cuModuleLoadData, "cuModuleLoadData", (Module*, const void*))                                   \
  X(cuModuleUnload, "cuModuleUnload", (Module))                                                     \
  X(cuModuleGetFunction, "cuModuleGetFunction", (Function*, Module, const char*))                   \
  X(cuFuncSetAttribute, "cuFuncSetAttribute", (Function, int, int))                                 \
  X(cuLaunchKernelEx, "cuLaunchKernelEx", (const LaunchConfig*, Function, void**, void**))          \
  X(cuMemsetD8Async, "cuMemsetD8Async", (Pointer, unsigned char, size_t, Stream))                   \
  X(cuMemAlloc, "cuMemAlloc_v2", (Pointer*, size_t))                                                \
  X(cuMemFree, "cuMemFree_v2", (Pointer))                                                           \
  X(cuMemcpyAsync, "cuMemcpyAsync", (Pointer, Pointer, size_t, Stream))                             \
  X(cuStreamSynchronize, "cuStreamSynchronize", (Stream))                                           \
  X(cuStreamCreate, "cuStreamCreate", (Stream*, unsigned))                                          \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (Stream))                                                \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (Stream, Event, unsigned))                              \
  X(cuEventCreate, "cuEventCreate", (Event*, unsigned))                                             \
  X(cuEventDestroy, "cuEventDestroy_v2", (Event))                                                   \
  X(cuEventRecord, "cuEventRecord", (Event, Stream))

struct Driver {
#define ECORNN_MEMBER(name, symbol, parameters) Result(*name) parameters;
  ECORNN_DRIVER(ECORNN_MEMBER)
#undef ECORNN_MEMBER
};

static Driver driver;  // filled by open_driver, under the caller's lock

static int fail(const char* kind, const char* message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

// The error of a driver call; `what` says for which kernel or amount, or is empty.
static int driver_error(Result result, const char* call, const char* what) {
  const char *name = nullptr, *text = nullptr;
  driver.cuGetErrorName(result, &name);
  driver.cuGetErrorString(result, &text);
  char message[512];
  snprintf(message, sizeof message, "%s (%s) in %s%s%s", name ? name : "unknown CUDA error",
           text ? text : "no description", call, *what ? " of " : "", what);
  return fail("RuntimeError", message);
}

#define ECORNN_CALL(what, name, ...)                                             \
  do {                                                                           \
    if (::ecornn::Result result_ = ::ecornn::driver.name(__VA_ARGS__))           \
      return ::ecornn::driver_error(result_, #name, what);                       \
  } while (0)

// Opens libcuda.so.1 and initializes it; safe to repeat after a failure.
static int open_driver() {
  char message[512];
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    snprintf(message, sizeof message,
             "this module needs a CUDA GPU and the NVIDIA driver, whose libcuda.so.1 cannot be opened: %s",
             dlerror());
    return fail("RuntimeError", message);
  }
#define ECORNN_LOOKUP(name, symbol, parameters)                                                         \
  if (!(driver.name = reinterpret_cast<Result(*) parameters>(dlsym(library, symbol)))) {                \
    snprintf(message, sizeof message, "libcuda.so.1 has no " symbol ": the NVIDIA driver is too old");  \
    return fail("RuntimeError", message);                                                               \
  }
  ECORNN_DRIVER(ECORNN_LOOKUP)
#undef ECORNN_LOOKUP
  ECORNN_CALL("", cuInit, 0);
  return 0;
}

class Locked {
 public:
  explicit Locked(pthread_mutex_t* lock) : lock_(lock) { pthread_mutex_lock(lock_); }
  ~Locked() { pthread_mutex_unlock(lock_); }
  Locked(const Locked&) = delete;

 private:
  pthread_mutex_t* lock_;
};

// Around what allocates or frees: it would be refused while this thread captures a CUDA graph, and the capture be lost.
// A caller cannot avoid it, since Python collects layers whenever it likes.
class RelaxedCapture {
 public:
  RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { driver.cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = kCaptureRelaxed;
};

// Makes a context current for a scope where another, or none, is current on this thread.
class Current {
 public:
  int enter(Context wanted) {
    Context now = nullptr;
    ECORNN_CALL("", cuCtxGetCurrent, &now);
    if (now == wanted) return 0;
    ECORNN_CALL("", cuCtxPushCurrent, wanted);
    pushed_ = true;
    return 0;
  }
  ~Current() {
    Context before;
    if (pushed_) driver.cuCtxPopCurrent(&before);
  }

 private:
  bool pushed_ = false;
};

}  // namespace ecornn
