// Runs generated CUDA kernels on a CPU, each thread a fiber: for tests without a GPU. Blocks run one after
// the other, those of a cooperative launch side by side.
// What it checks: indices, barriers, warp-wide instructions, fragments, asynchronous copies that nobody
// waited for (lazy) or that come too early (eager). What it cannot check: races, and the order of memory.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <ucontext.h>
#include <vector>

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
static uint3 threadIdx, blockIdx;
inline half __float2half_rn(float value) { return (half)value; }
inline float __uint_as_float(uint32_t word) { float f; memcpy(&f, &word, 4); return f; }
inline uint32_t __float_as_uint(float f) { uint32_t word; memcpy(&word, &f, 4); return word; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }

namespace emu {
enum State { kReady, kWarp, kBlock, kNamed, kDone };
struct Copy { void* to; const void* from; unsigned size, valid; };
struct Fiber {
  ucontext_t context;
  State state;
  unsigned turn;                        // of warp-wide instructions
  unsigned barrier;                     // the named one that it waits for
  std::deque<std::vector<Copy>> groups; // asynchronous copies; the last group is open
};
struct Slot { uint32_t words[12]; };
struct Block {
  alignas(1024) char memory[232448];
  unsigned arrived[16];                 // threads, at each named barrier
};
constexpr size_t kStack = 1 << 16;
constexpr unsigned kPatience = 1 << 20; // rounds of polling
static std::vector<Block> blocks;
static char* shared;                    // of the current block
static unsigned width;                  // threads of a block
static std::vector<Fiber> fibers;
static std::vector<Slot> slots[2];
static std::vector<char> stacks;
static ucontext_t scheduler;
static unsigned current;
static bool lazy;
static void (*body)(void**);
static void** arguments;

inline void wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}
inline void entry() {
  body(arguments);
  fibers[current].state = kDone;
  swapcontext(&fibers[current].context, &scheduler);
}
// Everyone in the warp has written its slot when this returns.
inline const Slot* exchange(const Slot& mine) {
  unsigned turn = fibers[current].turn++ % 2, me = current;
  slots[turn][me] = mine;
  wait(kWarp);
  return &slots[turn][me / 32 * 32];
}
[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "%s\n", what);
  abort();
}
// A named barrier, once for each thread; `count` threads complete it.
inline void arrive(unsigned id, unsigned count, bool stays) {
  unsigned block = current / width;
  if (id > 15 || count % 32) fail("a named barrier that does not exist");
  if (++blocks[block].arrived[id] == count) {
    blocks[block].arrived[id] = 0;
    for (unsigned i = block * width; i < (block + 1) * width; ++i)
      if (fibers[i].state == kNamed && fibers[i].barrier == id) fibers[i].state = kReady;
  } else if (stays) {
    fibers[current].barrier = id;
    wait(kNamed);
  }
}
inline void yield() { wait(kReady); }
inline void enter(unsigned i, unsigned first) {
  current = i;
  threadIdx = {i % width, 0, 0};
  blockIdx = {first + i / width, 0, 0};
  shared = blocks[i / width].memory;
}
// Blocks `first` and following, side by side.
inline void run_blocks(unsigned first) {
  unsigned threads = fibers.size();
  for (Block& b : blocks) {
    memset(b.memory, 0xff, sizeof b.memory);  // NaN in every type
    memset(b.arrived, 0, sizeof b.arrived);
  }
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.state = kReady;
    f.turn = 0;
    f.groups.assign(1, {});
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = &stacks[i * kStack];
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
  }
  unsigned rounds = 0;
  for (unsigned done = 0; done < threads;) {
    bool moved = false;
    if (++rounds > kPatience) fail("a poll for what nobody writes");
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state != kReady) continue;
      moved = true;
      enter(i, first);
      swapcontext(&scheduler, &fibers[i].context);
      done += fibers[i].state == kDone;
    }
    for (unsigned w = 0; w < threads; w += 32) {
      bool all = true;
      for (unsigned i = w; i < w + 32; ++i) all &= fibers[i].state == kWarp;
      for (unsigned i = w; all && i < w + 32; ++i) fibers[i].state = kReady, moved = true;
    }
    for (unsigned b = 0; b < threads; b += width) {
      bool all = true;
      for (unsigned i = b; i < b + width; ++i) all &= fibers[i].state == kBlock;
      for (unsigned i = b; all && i < b + width; ++i) fibers[i].state = kReady, moved = true;
    }
    if (!moved && done < threads) fail("deadlock: a barrier that not every thread reaches");
  }
}
inline void launch(void (*kernel)(void**), unsigned grid, unsigned threads, void** given, bool delay,
                   bool together) {
  if (threads % 32) fail("threads are no whole number of warps");
  unsigned beside = together ? grid : 1;
  width = threads;
  blocks.resize(beside);
  fibers.resize(beside * threads);
  slots[0].resize(fibers.size()), slots[1].resize(fibers.size());
  stacks.resize(fibers.size() * kStack);
  body = kernel, arguments = given, lazy = delay;
  for (unsigned b = 0; b < grid; b += beside) run_blocks(b);
}
inline void* at(unsigned address) {
  if (address >= sizeof(Block::memory)) fail("an address beyond shared memory");
  return shared + address;
}
inline void carry_out(const Copy& c) {
  memset(c.to, 0, c.size);
  memcpy(c.to, c.from, c.valid);
}
inline void cp_async(unsigned to, const void* from, unsigned size, unsigned valid) {
  if (to % size || uintptr_t(from) % size) fail("a misaligned asynchronous copy");
  Copy c{at(to), from, size, valid};
  if (lazy) fibers[current].groups.back().push_back(c);
  else carry_out(c);
}
inline void commit() { fibers[current].groups.emplace_back(); }
inline void wait_group(size_t pending) {
  auto& groups = fibers[current].groups;
  while (groups.size() > pending + 1) {
    for (const Copy& c : groups.front()) carry_out(c);
    groups.pop_front();
  }
}
inline float as_float(uint32_t word) { float f; memcpy(&f, &word, 4); return f; }
inline uint32_t as_word(float f) { uint32_t word; memcpy(&word, &f, 4); return word; }
template <typename E> float element(uint32_t word, int half_index) {
  E value;
  uint16_t bits = word >> (16 * half_index);
  memcpy(&value, &bits, 2);
  return (float)value;
}
// kind 0: float16, 1: bfloat16, 2: tf32. A: 16 rows x 8 words, B: 8 words x 8 columns.
inline void mma(int kind, float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
                uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, float c2, float c3) {
  unsigned lane = current % 32;
  const Slot* s = exchange({{a0, a1, a2, a3, b0, b1}});
  float c[4] = {c0, c1, c2, c3};
  for (int i = 0; i < 4; ++i) {
    unsigned row = lane / 4, column = lane % 4 * 2 + i % 2, upper = i / 2;
    double sum = c[i];
    for (unsigned word = 0; word < 8; ++word) {
      uint32_t a = s[row * 4 + word % 4].words[word / 4 * 2 + upper];
      uint32_t b = s[column * 4 + word % 4].words[4 + word / 4];
      if (kind == 2) {
        sum += double(as_float(a & 0xffffe000)) * as_float(b & 0xffffe000);
      } else {
        for (int h = 0; h < 2; ++h)
          sum += kind ? double(element<nv_bfloat16>(a, h)) * element<nv_bfloat16>(b, h)
                      : double(element<half>(a, h)) * element<half>(b, h);
      }
    }
    c[i] = (float)sum;
  }
  d0 = c[0], d1 = c[1], d2 = c[2], d3 = c[3];
}
template <typename W> void load4(W& a, W& b, W& c, W& d, const void* from) {
  if (uintptr_t(from) % 16) fail("a misaligned load of 16 bytes");
  W w[4];
  memcpy(w, from, 16);
  a = w[0], b = w[1], c = w[2], d = w[3];
}
template <typename W> void load2(W& a, W& b, const void* from) {
  if (uintptr_t(from) % 8) fail("a misaligned load of 8 bytes");
  W w[2];
  memcpy(w, from, 8);
  a = w[0], b = w[1];
}
inline void store4(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (uintptr_t(to) % 16) fail("a misaligned store of 16 bytes");
  uint32_t w[4] = {a, b, c, d};
  memcpy(to, w, 16);
}
template <typename E> uint32_t pack2(float high, float low) {
  E both[2] = {(E)low, (E)high};
  uint32_t word;
  memcpy(&word, both, 4);
  return word;
}
inline void ldmatrix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned address) {
  unsigned lane = current % 32;
  const Slot* s = exchange({{address}});
  uint32_t* r[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) memcpy(r[i], (char*)at(s[i * 8 + lane / 4].words[0]) + lane % 4 * 4, 4);
}
}  // namespace emu

inline void __syncthreads() { emu::wait(emu::kBlock); }
inline void __syncwarp() { emu::wait(emu::kWarp); }
inline unsigned __cvta_generic_to_shared(const void* p) { return (const char*)p - emu::shared; }
inline int __shfl_sync(uint, int value, int source, int) {
  return (int)emu::exchange({{(uint32_t)value}})[source].words[0];
}
inline float __shfl_xor_sync(uint, float value, int mask) {
  unsigned lane = emu::current % 32;
  return emu::as_float(emu::exchange({{emu::as_word(value)}})[lane ^ mask].words[0]);
}
