// What generated CUDA kernels see of CUDA where cuda_on_cpu.cc runs them: types, and functions for what Python made of
// inline PTX. It has little in it, since the compiler reads it with every kernel.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
using half = _Float16;
using std::fmaf;

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  explicit nv_bfloat16(float value) {  // to nearest, ties to even
    uint32_t u;
    memcpy(&u, &value, 4);
    bits = std::isnan(value) ? 0x7fff : (u + 0x7fff + (u >> 16 & 1)) >> 16;
  }
  explicit operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float value;
    memcpy(&value, &u, 4);
    return value;
  }
};
struct uint3 { unsigned x, y, z; };
extern uint3 threadIdx, blockIdx;
inline half __float2half_rn(float value) { return (half)value; }
inline nv_bfloat16 __float2bfloat16_rn(float value) { return nv_bfloat16(value); }
inline float __uint_as_float(uint32_t word) { float f; memcpy(&f, &word, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t word; memcpy(&word, &f, 4); return word; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }

namespace emu {
enum State { kReady, kWarp, kBlock, kCluster, kNamed, kPhase, kDone };
struct Slot { uint32_t words[12]; };
extern char* shared;                    // of the current block
extern unsigned current;                // thread of the blocks that run side by side
constexpr unsigned kShared = 232448;    // bytes of shared memory

// Where the order of memory is emulated, what went wrong, or null; else nobody returns from what went wrong.
const char* launch(void (*kernel)(void**), unsigned grid, unsigned threads, void** given, bool delay, bool together,
                   unsigned in_cluster, bool ordered);
unsigned clock();
bool on_stack(const void* place);       // of a thread
[[noreturn]] void fail(const char* what);
void wait(State state);
void yield();                           // of a poll
void meet();                            // all lanes of a warp, which know afterwards what each has stored
// The order of memory: of stores to global memory, of other proxies, of the beginning of mbarriers.
void fence();
void proxy_fence();
void proxy_fence_shared();
void mbarrier_fence();
void add(unsigned* to, unsigned value, bool release);
unsigned acquire(const unsigned* from);
void* at(unsigned address);
const Slot* exchange(const Slot& mine); // everyone in the warp has written its slot when this returns
void arrive(unsigned id, unsigned count, bool stays);  // at a named barrier, which `count` threads complete
// Asynchronous copies.
void cp_async(unsigned to, const void* from, unsigned size, unsigned valid);
void cp_async_arrive(unsigned address);
void commit();
void wait_group(size_t pending);
void bulk_copy(unsigned to, const void* from, unsigned size, unsigned address);
void multicast(unsigned to, const void* from, unsigned size, unsigned address, unsigned blocks);
// Mbarriers, by address; above bit 24 of an address in a cluster is the block's rank + 1.
void mbarrier_init(unsigned address, unsigned count);
void mbarrier_arrive(unsigned address, int64_t announced = 0);
void mbarrier_wait(unsigned address, unsigned parity);
unsigned mbarrier_test(unsigned address, unsigned parity);
inline unsigned mapa(unsigned address, unsigned rank) { return address | (rank + 1) << 24; }
void send(unsigned to, uint32_t word, unsigned barrier);
// Products; kind 0: float16, 1: bfloat16, 2: tf32.
void mma(int kind, float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
         uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3);
void wgmma(int kind, unsigned columns, uint64_t a, uint64_t b, bool keep, std::initializer_list<float*> d,
           bool across = false);
void wgmma_registers(int kind, unsigned columns, std::initializer_list<uint32_t> a, uint64_t b, bool keep,
                     std::initializer_list<float*> d);
void wgmma_commit();
void wgmma_wait(size_t pending);
void ldmatrix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned address);
void ldmatrix_transposed(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned address);

inline float as_float(uint32_t word) { float f; memcpy(&f, &word, 4); return f; }
inline uint32_t as_word(float f) { uint32_t word; memcpy(&word, &f, 4); return word; }
template <typename W> void load4(W& a, W& b, W& c, W& d, const void* from) {
  if (uintptr_t(from) % 16) fail("a misaligned load of 16 bytes");
  const W* w = (const W*)from;
  a = w[0], b = w[1], c = w[2], d = w[3];
}
template <typename W> void load2(W& a, W& b, const void* from) {
  if (uintptr_t(from) % 8) fail("a misaligned load of 8 bytes");
  const W* w = (const W*)from;
  a = w[0], b = w[1];
}
inline void store2(void* to, uint32_t a, uint32_t b) {
  if (uintptr_t(to) % 8) fail("a misaligned store of 8 bytes");
  uint32_t* w = (uint32_t*)to;
  w[0] = a, w[1] = b;
}
inline void store4(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (uintptr_t(to) % 16) fail("a misaligned store of 16 bytes");
  uint32_t* w = (uint32_t*)to;
  w[0] = a, w[1] = b, w[2] = c, w[3] = d;
}
template <typename E> uint32_t pack2(float high, float low) {
  E both[2] = {(E)low, (E)high};
  uint32_t word;
  memcpy(&word, both, 4);
  return word;
}
inline uint32_t permuted(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t(high) << 32 | low;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t from = selector >> 4 * i & 15;
    if (from > 7) fail("a permutation that replicates signs");
    word |= uint32_t(bytes >> 8 * from & 255) << 8 * i;
  }
  return word;
}
// a * b + c of both 16-bit values of words, rounded once; `relu`: 0 in place of what is less.
template <typename E> uint32_t both_halves(uint32_t a, uint32_t b, uint32_t c, bool relu) {
  E x[2], y[2], z[2];
  memcpy(x, &a, 4), memcpy(y, &b, 4), memcpy(z, &c, 4);
  for (int i = 0; i < 2; ++i) {
    const float value = fmaf((float)x[i], (float)y[i], (float)z[i]);
    z[i] = (E)(relu && !(value > 0) ? 0.0f : value);
  }
  memcpy(&c, z, 4);
  return c;
}
inline float finite_half(float value) { return value > 65504 ? 65504 : value < -65504 ? -65504 : value; }
template <bool larger> float extremum(float x, float y) {
  return (larger ? x > y : x < y) || x != x ? x : y;
}
inline float tanh_approx(float x) { return (half)tanhf(x); }  // a relative error of 2^-11, as PTX says of it
inline float half_of(uint32_t word, int shift) {
  uint16_t bits = word >> shift;
  half value;
  memcpy(&value, &bits, 2);
  return value;
}
inline uint16_t half_bits(float value) {
  half rounded = (half)value;
  uint16_t bits;
  memcpy(&bits, &rounded, 2);
  return bits;
}
inline float of_half_bits(uint16_t bits) { return half_of(bits, 0); }
inline uint32_t tf32(float value) {  // to nearest, ties away from zero
  uint32_t word;
  memcpy(&word, &value, 4);
  return (word & 0x7F800000u) == 0x7F800000u ? word : (word + 0x1000u) & 0xFFFFE000u;
}
}  // namespace emu

inline void __syncthreads() { emu::wait(emu::kBlock); }
inline void __syncwarp() { emu::meet(); }
// Lanes here run one by one: those at the same place of a branch need not meet.
inline unsigned __activemask() { return 1u << emu::current % 32; }
inline void __syncwarp(unsigned) {}
inline unsigned __cvta_generic_to_shared(const void* p) { return (const char*)p - emu::shared; }
int __shfl_sync(uint, int value, int source, int);
unsigned __ballot_sync(uint, int value);
float __shfl_xor_sync(uint, float value, int mask);
