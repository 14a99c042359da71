// A module file by hand, for tests of the runtime: h = h / 2 + W[1] x + b, c = c + h, y = h, in float64.
// With SAMPLE_SEQUENCES a table says which sequence a column works on; see ecornn.Columns.
// It checks what it is given: alignment of every pointer, and that nobody else writes its workspace.
// "Device" memory is host memory that alloc, copy and free keep count of.
#include <stdlib.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "manifest.h"  // kManifest, kHidden, kInput, kScratch0, kScratch1

#ifdef SAMPLE_BFLOAT16
using Element = uint16_t;
static double Load(const Element* p) {
  uint32_t bits = static_cast<uint32_t>(*p) << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static void Store(Element* p, double value) {
  float single = static_cast<float>(value);
  uint32_t bits;
  memcpy(&bits, &single, 4);
  *p = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
#else
using Element = float;
static double Load(const Element* p) { return *p; }
static void Store(Element* p, double value) { *p = static_cast<float>(value); }
#endif

enum Stat { kLive, kCopies, kSynchronized, kQueue, kRunning, kMostRunning, kWorkspace, kRuns, kStats };
static std::atomic<int64_t> stats[kStats];

static int Fail(const char* message) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

static bool Aligned(const TVMFFIAny& pointer, int64_t to) {
  return pointer.v_int64 != 0 && pointer.v_int64 % to == 0;
}

#define EXPORT(name)                                                                             \
  extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* a, int32_t count, \
                                                     TVMFFIAny* result)

EXPORT(manifest) {
  (void)a;
  if (count) return Fail("manifest() takes no arguments");
  TVMFFIByteArray text{kManifest, strlen(kManifest)};
  return TVMFFIStringFromByteArray(&text, result);
}

static int Integer(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
  return 0;
}

EXPORT(stat) { return count != 1 ? Fail("stat(index)") : Integer(result, stats[a[0].v_int64]); }

#ifdef SAMPLE_SEQUENCES
constexpr int kArguments = 15;
#else
constexpr int kArguments = 14;
#endif

// run(T, B, device, queue, scratch, x, h_in, c_in, matrix, y, h_out, c_out, bias, words[, sequences])
EXPORT(run) {
  (void)result;
  if (count != kArguments) return Fail("run() takes other arguments");
  for (int i = 0; i < count; ++i)
    if (a[i].type_index != kTVMFFIInt) return Fail("run() takes integers");
  int64_t T = a[0].v_int64, B = a[1].v_int64, H = kHidden, I = kInput;
  for (int i : {4, 8, 12, 13})
    if (!Aligned(a[i], 64)) return Fail("weights or workspace are not aligned");
  for (int i : {4, 13})
    if (!Aligned(a[i], 256)) return Fail("workspace is not aligned to 256 bytes");
  for (int i : {5, 6, 7, 9, 10, 11})
    if (!Aligned(a[i], 16)) return Fail("x, y or a state is not aligned to 16 bytes");
  static std::atomic<uint32_t> calls{0};
  uint32_t own = ++calls;
  int64_t running = ++stats[kRunning];
  if (running > stats[kMostRunning]) stats[kMostRunning] = running;
  stats[kQueue] = a[3].v_int64, stats[kWorkspace] = a[4].v_int64, ++stats[kRuns];
  auto* scratch = reinterpret_cast<uint32_t*>(a[4].v_int64);
  auto* words = reinterpret_cast<uint32_t*>(a[13].v_int64);
  int64_t size = kScratch0 + kScratch1 * T;
  for (int64_t i = 0; i < size; ++i) scratch[i] = own;
  for (int64_t i = 0; i < T; ++i) words[i] = ~own;

  auto* x = reinterpret_cast<const Element*>(a[5].v_int64);
  auto* matrix = reinterpret_cast<const float*>(a[8].v_int64);  // (I, 2, 4): H = 5 padded to 8, in fours
  auto* bias = reinterpret_cast<const float*>(a[12].v_int64);
  auto* y = reinterpret_cast<Element*>(a[9].v_int64);
  std::vector<double> h(B * H), c(B * H);
#ifdef SAMPLE_SEQUENCES
  auto* numbers = reinterpret_cast<const int32_t*>(a[14].v_int64);
  std::vector<double> pieces(B * H * 2);
#else
  for (int64_t i = 0; i < B * H; ++i) {
    h[i] = Load(reinterpret_cast<const Element*>(a[6].v_int64) + i);
    c[i] = Load(reinterpret_cast<const Element*>(a[7].v_int64) + i);
  }
#endif
  for (int64_t t = 0; t < T; ++t)
    for (int64_t b = 0; b < B; ++b)
      for (int64_t j = 0; j < H; ++j) {
#ifdef SAMPLE_SEQUENCES
        // 1 << 30 marks the first piece of a sequence in two columns, 1 << 29 the second, one column before
        int64_t mark = numbers[t * B + b], number = mark & ((1 << 29) - 1), state = number * H + j;
        if (mark < 0) {
          Store(y + (t * B + b) * H + j, 0);
          continue;
        }
        if ((t == 0 || numbers[(t - 1) * B + b] != mark) && mark >> 29 & 1) {
          h[b * H + j] = pieces[((b + 1) * H + j) * 2];
          c[b * H + j] = pieces[((b + 1) * H + j) * 2 + 1];
        } else if (t == 0 || numbers[(t - 1) * B + b] != mark) {
          h[b * H + j] = Load(reinterpret_cast<const Element*>(a[6].v_int64) + state);
          c[b * H + j] = Load(reinterpret_cast<const Element*>(a[7].v_int64) + state);
        }
#endif
        double sum = bias[j] + 0.5 * h[b * H + j];
        for (int64_t k = 0; k < I; ++k) sum += Load(x + (t * B + b) * I + k) * matrix[k * 8 + j];
        h[b * H + j] = sum;
        c[b * H + j] += sum;
        Store(y + (t * B + b) * H + j, sum);
#ifdef SAMPLE_SEQUENCES
        if (mark >> 30 & 1) {
          pieces[(b * H + j) * 2] = h[b * H + j];
          pieces[(b * H + j) * 2 + 1] = c[b * H + j];
          continue;
        }
        Store(reinterpret_cast<Element*>(a[10].v_int64) + state, h[b * H + j]);
        Store(reinterpret_cast<Element*>(a[11].v_int64) + state, c[b * H + j]);
      }
#else
      }
  for (int64_t i = 0; i < B * H; ++i) {
    Store(reinterpret_cast<Element*>(a[10].v_int64) + i, h[i]);
    Store(reinterpret_cast<Element*>(a[11].v_int64) + i, c[i]);
  }
#endif
  usleep(500);
  --stats[kRunning];
  for (int64_t i = 0; i < size; ++i)
    if (scratch[i] != own) return Fail("another call wrote this call's workspace");
  for (int64_t i = 0; i < T; ++i)
    if (words[i] != ~own) return Fail("parts of the workspace overlap");
  return 0;
}

#ifdef SAMPLE_CUDA
EXPORT(alloc) {
  if (count != 2) return Fail("alloc(device, nbytes)");
  void* memory = nullptr;
  if (posix_memalign(&memory, 256, a[1].v_int64 + 1)) return Fail("out of memory");
  ++stats[kLive];
  return Integer(result, reinterpret_cast<int64_t>(memory));
}

EXPORT(free) {
  (void)result;
  if (count != 2) return Fail("free(device, pointer)");
  free(reinterpret_cast<void*>(a[1].v_int64));
  --stats[kLive];
  return 0;
}

EXPORT(copy) {
  (void)result;
  if (count != 5) return Fail("copy(device, to, from, nbytes, queue)");
  memcpy(reinterpret_cast<void*>(a[1].v_int64), reinterpret_cast<void*>(a[2].v_int64), a[3].v_int64);
  ++stats[kCopies];
  return 0;
}

EXPORT(synchronize) {
  (void)result, (void)a;
  if (count != 2) return Fail("synchronize(device, queue)");
  ++stats[kSynchronized];
  return 0;
}
#endif
