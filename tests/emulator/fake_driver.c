/* A libcuda.so.1 for tests on machines without a GPU: it says on stderr what it is asked, one line a call,
 * and touches no memory, unless FAKE_KERNELS names a library of kernels made by cuda_on_cpu.py: these are carried out at
 * once, on memory of the host, which is what it allocates then. FAKE_FAIL=<function>:<code> lets a function fail, <function>:<code>:<n> only its n-th call
 * (from 1 on), FAKE_MAJOR is the capability. Streams and events that it makes are numbers from 900 and 500 on.
 * FAKE_CAPTURES stands for a graph that is captured meanwhile: what allocates or frees is refused, as CUDA does, unless
 * this thread's mode is relaxed. FAKE_PARAMETERS is "symbol:ppi;..." with p for a pointer and i for an int32, to print arguments. */
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static __thread const void *current;
static __thread int capture_mode;

static int fails(const char *name) {
  static int calls;
  const char *text = getenv("FAKE_FAIL");
  size_t length = strlen(name);
  if (!text || strncmp(text, name, length) || text[length] != ':') return 0;
  const char *only = strchr(text + length + 1, ':');
  return !only || __sync_add_and_fetch(&calls, 1) == atoi(only + 1) ? atoi(text + length + 1) : 0;
}

/* One write a line, so that threads do not mix theirs. */
#define CALL(name, format, ...)                                  \
  do {                                                           \
    fprintf(stderr, #name " " format "\n", ##__VA_ARGS__);       \
    int failed = fails(#name);                                   \
    if (failed) return failed;                                   \
  } while (0)

#define UNSAFE(name, format, ...)                                \
  do {                                                           \
    CALL(name, format, ##__VA_ARGS__);                           \
    if (getenv("FAKE_CAPTURES") && capture_mode != 2) {          \
      fprintf(stderr, #name " is refused\n");                    \
      return 900;                                                \
    }                                                            \
  } while (0)

int cuInit(unsigned flags) { CALL(cuInit, "%u", flags); return 0; }
int cuGetErrorName(int code, const char **out) { *out = code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER"; return 0; }
int cuGetErrorString(int code, const char **out) { *out = code == 700 ? "an illegal address" : "something else"; return 0; }
int cuDeviceGetCount(int *out) { *out = 2; return 0; }
int cuDeviceGet(int *out, int index) { CALL(cuDeviceGet, "%d", index); *out = 10 + index; return 0; }
int cuDeviceGetName(char *out, int size, int device) { (void)device; snprintf(out, (size_t)size, "Fake GPU"); return 0; }
int cuDeviceTotalMem_v2(size_t *out, int device) { (void)device; *out = (size_t)80 << 30; return 0; }
int cuDriverGetVersion(int *out) { *out = 13020; return 0; }
int cuDeviceGetAttribute(int *out, int attribute, int device) {
  (void)device;
  const char *major = getenv("FAKE_MAJOR");
  *out = attribute == 75 ? (major ? atoi(major) : 9) : attribute == 76 ? 0 : 1000 + attribute;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int device) {
  CALL(cuDevicePrimaryCtxRetain, "%d", device);
  *out = (void *)(uintptr_t)(100 + device);
  return 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { UNSAFE(cuDevicePrimaryCtxRelease, "%d", device); return 0; }
int cuCtxGetCurrent(const void **out) { *out = current; return 0; }
int cuCtxPushCurrent_v2(const void *context) { CALL(cuCtxPushCurrent, "%d", (int)(uintptr_t)context); current = context; return 0; }
int cuCtxPopCurrent_v2(const void **out) { CALL(cuCtxPopCurrent, ""); *out = current; current = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { int old = capture_mode; capture_mode = *mode; *mode = old; return 0; }
int cuModuleLoadData(void **out, const void *image) {
  UNSAFE(cuModuleLoadData, "elf=%d capture_mode=%d", !memcmp(image, "\177ELF", 4), capture_mode);
  *out = (void *)1;
  return 0;
}
int cuModuleUnload(void *module) { (void)module; UNSAFE(cuModuleUnload, ""); return 0; }
int cuModuleGetFunction(char **out, void *module, const char *name) {
  (void)module;
  CALL(cuModuleGetFunction, "%s", name);
  *out = strdup(name);
  return 0;
}
int cuFuncSetAttribute(const char *function, int attribute, int value) {
  CALL(cuFuncSetAttribute, "%s %d %d", function, attribute, value);
  return 0;
}

struct attribute { int id, padding; unsigned value[16]; };
struct config { unsigned grid[3], block[3], shared; void *stream; struct attribute *attributes; unsigned count; };

int cuLaunchKernelEx(const struct config *c, const char *function, void **arguments, void **extra) {
  char line[1024];
  int used = snprintf(line, sizeof line, "%s grid=%u threads=%u shared=%u stream=%d", function, c->grid[0],
                      c->block[0], c->shared, (int)(uintptr_t)c->stream);
  for (unsigned i = 0; i < c->count; ++i)
    used += snprintf(line + used, sizeof line - used, " attribute%d=%u", c->attributes[i].id, c->attributes[i].value[0]);
  if (getenv("FAKE_CONTEXTS")) used += snprintf(line + used, sizeof line - used, " context=%d", (int)(uintptr_t)current);
  const char *kinds = getenv("FAKE_PARAMETERS");
  kinds = kinds ? strstr(kinds, function) : 0;
  if (kinds) {
    used += snprintf(line + used, sizeof line - used, " arguments");
    for (kinds += strlen(function) + 1; *kinds == 'p' || *kinds == 'i'; ++kinds, ++arguments)
      used += snprintf(line + used, sizeof line - used, " %lld",
                       *kinds == 'p' ? *(long long *)*arguments : (long long)*(int *)*arguments);
  }
  if (extra || c->grid[1] != 1 || c->grid[2] != 1 || c->block[1] != 1 || c->block[2] != 1) return 1;
  CALL(cuLaunchKernelEx, "%s", line);
  const char *kernels = getenv("FAKE_KERNELS");
  if (kernels) {
    char symbol[256];
    snprintf(symbol, sizeof symbol, "emu_%s", function);
    void (*emulated)(unsigned, unsigned, void **, bool, bool, unsigned) = dlsym(dlopen(kernels, RTLD_NOW), symbol);
    bool together = false;
    unsigned cluster = 1;
    for (unsigned i = 0; i < c->count; ++i) {
      together |= c->attributes[i].id == 2;
      if (c->attributes[i].id == 4) cluster = c->attributes[i].value[0];
    }
    emulated(c->grid[0], c->block[0], arguments, true, together, cluster);
  }
  return 0;
}
int cuMemsetD8Async(uint64_t pointer, unsigned char byte, size_t size, void *stream) {
  CALL(cuMemsetD8Async, "%d byte=%d size=%d stream=%d", (int)pointer, byte, (int)size, (int)(uintptr_t)stream);
  if (getenv("FAKE_KERNELS")) memset((void *)pointer, byte, size);
  return 0;
}
int cuMemAlloc_v2(uint64_t *out, size_t size) {
  UNSAFE(cuMemAlloc, "%d", (int)size);
  *out = getenv("FAKE_KERNELS") ? (uint64_t)(uintptr_t)aligned_alloc(256, (size + 255) / 256 * 256) : 4096;
  return 0;
}
int cuMemFree_v2(uint64_t pointer) {
  UNSAFE(cuMemFree, "%d", (int)pointer);
  if (getenv("FAKE_KERNELS")) free((void *)(uintptr_t)pointer);
  return 0;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t size, void *stream) {
  CALL(cuMemcpyAsync, "%d %d %d stream=%d", (int)to, (int)from, (int)size, (int)(uintptr_t)stream);
  if (getenv("FAKE_KERNELS")) memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
  return 0;
}
int cuStreamCreate(void **out, unsigned flags) {
  static int made;
  *out = 0;
  UNSAFE(cuStreamCreate, "flags=%u capture_mode=%d", flags, capture_mode);
  *out = (void *)(uintptr_t)(900 + __sync_fetch_and_add(&made, 1));
  return 0;
}
int cuStreamDestroy_v2(void *stream) { UNSAFE(cuStreamDestroy, "%d", (int)(uintptr_t)stream); return 0; }
int cuEventCreate(void **out, unsigned flags) {
  static int made;
  *out = 0;
  UNSAFE(cuEventCreate, "flags=%u capture_mode=%d", flags, capture_mode);
  *out = (void *)(uintptr_t)(500 + __sync_fetch_and_add(&made, 1));
  return 0;
}
int cuEventDestroy_v2(void *event) { UNSAFE(cuEventDestroy, "%d", (int)(uintptr_t)event); return 0; }
int cuEventRecord(void *event, void *stream) {
  CALL(cuEventRecord, "%d stream=%d", (int)(uintptr_t)event, (int)(uintptr_t)stream);
  return 0;
}
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
  CALL(cuStreamWaitEvent, "%d stream=%d", (int)(uintptr_t)event, (int)(uintptr_t)stream);
  return flags != 0;
}
int cuStreamSynchronize(void *stream) { CALL(cuStreamSynchronize, "%d", (int)(uintptr_t)stream); return 0; }
