// What host_cpu.cc and the generated program.cc know of each other. It includes little: program.cc is compiled for every
// module, host_cpu.cc once.
#pragma once
#include <tvm/ffi/c_api.h>

#define ECORNN_EXPORT extern "C" __attribute__((visibility("default")))

namespace ecornn {

// One worker (a packed function by TVM's LLVM code generator) and what it is given.
struct Call {
  int (*worker)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
  const int* pointers;  // numbers among those of the entry; some of them may be the same
  int count;
  int most;     // threads; 0: any number
  double work;  // multiply-adds of a row in a step, about; 0: nobody knows
};

// An entry of the module: its calls in order, and how many pointers it takes.
struct Entry {
  const char* name;
  const Call* calls;
  int length;
  int pointers;
};

// name(T, B, device, threads, *pointers) -> None
int Enter(const Entry& entry, const TVMFFIAny* args, int32_t count, TVMFFIAny* result);

}  // namespace ecornn

#define ECORNN_WORKER(name) \
  extern "C" int name(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result);

// After `name`_calls, the calls of the entry.
#define ECORNN_ENTRY(name, pointers)                                                                               \
  ECORNN_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {             \
    return ecornn::Enter({#name, name##_calls, sizeof name##_calls / sizeof *name##_calls, pointers}, args, count, \
                         result);                                                                                  \
  }
