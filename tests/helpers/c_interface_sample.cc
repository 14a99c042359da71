// A GPU's module that has the C interface alone: its memory and its kernel are functions of Python.
#include <string.h>
#include <tvm/ffi/c_api.h>

#include <cstdint>

// The number of the function, as in EXPORT, and its arguments.
using Answer = int64_t (*)(int32_t function, const int64_t* args, int32_t count);
static Answer answer;

extern "C" void answer_by(Answer function) { answer = function; }

#define EXPORT(name, number)                                                                                      \
  extern "C" int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {               \
    int64_t values[256];                                                                                          \
    for (int32_t n = 0; n < count; ++n) values[n] = args[n].v_int64;                                              \
    memset(result, 0, sizeof *result);                                                                            \
    result->type_index = kTVMFFIInt;                                                                              \
    result->v_int64 = answer(number, values, count);                                                              \
    return 0;                                                                                                     \
  }

EXPORT(pack, 0)
EXPORT(alloc, 1)
EXPORT(free, 2)
EXPORT(copy, 3)
EXPORT(synchronize, 4)
