// Runs generated CUDA kernels on a CPU, each thread a fiber: for tests without a GPU. Blocks run one after
// the other, those of a cooperative launch side by side.
// What it checks: indices, barriers, warp-wide instructions, fragments, asynchronous copies that nobody
// waited for (lazy) or that come too early (eager), and, where it is asked for, the order of memory
// (memory_order.cc). What it cannot check: races in shared memory, and the order of wgmma's registers.
#include "cuda_on_cpu.h"

#include "memory_order.h"

#include <cstdio>
#include <deque>
#include <map>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

uint3 threadIdx, blockIdx;

namespace emu {
struct Copy { void* to; const void* from; unsigned size, valid; bool bulk; };
struct Product {                        // of a warpgroup (wgmma): one thread's part
  int kind;
  uint64_t a, b;
  bool keep;
  bool across;                          // whether K is the outer axis of both operands in memory
  bool held;                            // whether operand A is in registers: these
  uint32_t rows[4];
  std::vector<float*> d;
};
struct Fiber {
  ucontext_t context;                   // where it starts
  jmp_buf place;                        // where it goes on
  bool begun;
  State state;
  unsigned turn;                        // of warp-wide instructions
  bool meets;                           // all lanes of its warp
  std::vector<unsigned> initialized;    // mbarriers, since its last fence
  unsigned barrier;                     // the named one, or the mbarrier's address, that it waits for
  std::deque<std::vector<Product>> products; // groups; the last one is open
  std::deque<std::vector<Copy>> groups; // asynchronous copies; the last group is open
};
struct Later { std::vector<Copy> copies; unsigned arrivals; int64_t bytes; };
struct Mbarrier {
  unsigned count, pending, phase;
  int64_t bytes;                        // announced and not yet arrived
  std::vector<Later> later;             // asynchronous work that will arrive here
  bool fenced;                          // since it was initialized
  order::Knowledge knowledge;           // of who arrived
};
struct Block {
  alignas(1024) char memory[kShared];
  std::map<unsigned, Mbarrier> mbarriers; // by address
  unsigned arrived[16];                 // threads, at each named barrier
  order::Knowledge knowledge[16];
};
constexpr size_t kStack = 1 << 16;
constexpr unsigned kPatience = 1 << 20; // rounds of polling
constexpr unsigned kQuiet = 8;          // rounds in which somebody polls and nothing else happens
static std::vector<Block> blocks;
char* shared;
static unsigned width;                  // threads of a block
static unsigned cluster;                // blocks of a cluster
static unsigned ticks;                  // of a clock
static std::deque<uint32_t> sent;       // words on their way through a cluster
static std::vector<Fiber> fibers;
static std::vector<Slot> slots[2];
static std::vector<char> stacks;
static jmp_buf scheduler;
unsigned current;
static bool polled;                     // since the last event
static unsigned long events;            // barriers and phases completed
static bool lazy;
static void (*body)(void**);
static void** arguments;

void wait(State state) {
  order::settle();
  fibers[current].state = state;
  if (!_setjmp(fibers[current].place)) _longjmp(scheduler, 1);
}
static void entry() {
  body(arguments);
  order::settle();
  if (fibers[current].products.size() > 1 || !fibers[current].products[0].empty()) {
    fprintf(stderr, "products that nobody waited for\n");
    abort();
  }
  fibers[current].state = kDone;
  _longjmp(scheduler, 1);
}
const Slot* exchange(const Slot& mine) {
  unsigned turn = fibers[current].turn++ % 2, me = current;
  slots[turn][me] = mine;
  wait(kWarp);
  return &slots[turn][me / 32 * 32];
}
static jmp_buf failed;
static const char* fault;
[[noreturn]] void fail(const char* what) {
  if (order::on) fault = what, _longjmp(failed, 1);
  fprintf(stderr, "%s\n", what);
  abort();
}
// A named barrier, once for each thread; `count` threads complete it.
void arrive(unsigned id, unsigned count, bool stays) {
  unsigned block = current / width;
  if (id > 15 || count % 32) fail("a named barrier that does not exist");
  order::Knowledge& all = blocks[block].knowledge[id];
  order::settle();
  if (order::on) order::give(current, all);
  if (++blocks[block].arrived[id] == count) {
    blocks[block].arrived[id] = 0, ++events;
    if (stays) order::take(current, all);
    for (unsigned i = block * width; i < (block + 1) * width; ++i)
      if (fibers[i].state == kNamed && fibers[i].barrier == id) fibers[i].state = kReady, order::take(i, all);
    all = {};
  } else if (stays) {
    fibers[current].barrier = id;
    wait(kNamed);
  }
}
void meet() {
  fibers[current].meets = true;
  wait(kWarp);
}
unsigned clock() { return ticks += 64; }
bool on_stack(const void* place) { return place >= &stacks.front() && place <= &stacks.back(); }
void yield() {                   // of a poll
  polled = true;
  wait(kReady);
}
static void enter(unsigned i, unsigned first) {
  current = i;
  threadIdx = {i % width, 0, 0};
  blockIdx = {first + i / width, 0, 0};
  shared = blocks[i / width].memory;
}
static void carry_out(const Copy& c) {
  memset(c.to, 0, c.size);
  memcpy(c.to, c.from, c.valid);
  if (order::on && !c.bulk) order::copied(c.to, c.size);
}
// Arrivals and bytes at an mbarrier; the phase ends when none is missing.
static void arrived(Block& block, unsigned address, unsigned arrivals, int64_t bytes) {
  Mbarrier& m = block.mbarriers.at(address);
  if (arrivals > m.pending) fail("more arrivals at an mbarrier than it counts");
  m.pending -= arrivals;
  m.bytes -= bytes;
  if (m.pending || m.bytes) return;
  m.pending = m.count;
  ++m.phase, ++events;
  unsigned first = (&block - &blocks[0]) * width;
  for (unsigned i = first; i < first + width; ++i)
    if (fibers[i].state == kPhase && fibers[i].barrier == address) fibers[i].state = kReady;
}
static void deliver(Block& block, unsigned address, const Later& work) {
  for (const Copy& c : work.copies) carry_out(c);
  arrived(block, address, work.arrivals, work.bytes);
}
// Nobody can go on: asynchronous work comes as late as it can, for one mbarrier that threads wait for.
static bool deliver_one() {
  for (unsigned i = 0; i < fibers.size(); ++i) {
    if (fibers[i].state != kPhase) continue;
    Block& block = blocks[i / width];
    unsigned address = fibers[i].barrier;
    std::vector<Later> work;
    work.swap(block.mbarriers.at(address).later);
    for (const Later& one : work) deliver(block, address, one);
    if (!work.empty()) return true;
  }
  return false;
}
// Until the fiber waits or ends. Jumps, unlike swapcontext, ask nothing of the system.
static void go_on(Fiber& f) {
  if (_setjmp(scheduler)) return;
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  setcontext(&f.context);
}
// Blocks `first` and following, side by side.
static void run_blocks(unsigned first) {
  unsigned threads = fibers.size();
  if (order::on) order::begin(threads);
  for (Block& b : blocks) {
    memset(b.memory, 0xff, sizeof b.memory);  // NaN in every type
    memset(b.arrived, 0, sizeof b.arrived);
    for (order::Knowledge& k : b.knowledge) k = {};
    b.mbarriers.clear();
  }
  sent.clear();
  for (unsigned i = 0; i < threads; ++i) {
    Fiber& f = fibers[i];
    f.state = kReady;
    f.begun = f.meets = false;
    f.initialized.clear();
    f.turn = 0;
    f.groups.assign(1, {});
    f.products.assign(1, {});
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = &stacks[i * kStack];
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = nullptr;
    makecontext(&f.context, entry, 0);
  }
  unsigned rounds = 0, quiet = 0;
  unsigned long before = events;
  for (unsigned done = 0; done < threads;) {
    bool moved = false;
    if (++rounds > kPatience) fail("a poll for what nobody writes");
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers[i].state != kReady) continue;
      enter(i, first);
      moved = true;
      go_on(fibers[i]);
      done += fibers[i].state == kDone;
    }
    for (unsigned w = 0; w < threads; w += 32) {
      bool all = true;
      for (unsigned i = w; i < w + 32; ++i) all &= fibers[i].state == kWarp;
      if (all && order::on && fibers[w].meets) order::meet(w, w + 32);
      for (unsigned i = w; all && i < w + 32; ++i) fibers[i].state = kReady, fibers[i].meets = false, moved = true;
    }
    for (unsigned b = 0; b < threads; b += width) {
      bool all = true;
      for (unsigned i = b; i < b + width; ++i) all &= fibers[i].state == kBlock;
      if (all && order::on) order::meet(b, b + width);
      for (unsigned i = b; all && i < b + width; ++i) fibers[i].state = kReady, moved = true, ++events;
    }
    for (unsigned c = 0; c < threads; c += width * cluster) {
      bool all = true;
      for (unsigned i = c; i < c + width * cluster; ++i) all &= fibers[i].state == kCluster;
      if (all && order::on) order::meet(c, c + width * cluster);
      for (unsigned i = c; all && i < c + width * cluster; ++i) fibers[i].state = kReady, moved = true, ++events;
    }
    // Who polls goes on for ever; asynchronous work that others wait for comes when nothing else happens.
    if (events != before) before = events, quiet = 0, polled = false;
    else if (polled && ++quiet == kQuiet) deliver_one(), quiet = 0;
    if (!moved && done < threads && !deliver_one()) fail("deadlock: a barrier that not every thread reaches");
  }
  for (const Block& b : blocks)
    for (const auto& [address, m] : b.mbarriers)
      if (m.pending != m.count || m.bytes || !m.later.empty()) fail("an mbarrier in the middle of a phase at the end");
}
const char* launch(void (*kernel)(void**), unsigned grid, unsigned threads, void** given, bool delay,
                   bool together, unsigned in_cluster, bool ordered) {
  if (threads % 32) fail("threads are no whole number of warps");
  unsigned beside = together ? grid : in_cluster;
  cluster = in_cluster;
  width = threads;
  blocks.resize(beside);
  fibers.resize(beside * threads);
  slots[0].resize(fibers.size()), slots[1].resize(fibers.size());
  stacks.resize(fibers.size() * kStack);
  body = kernel, arguments = given, lazy = delay, order::on = ordered;
  if (_setjmp(failed)) return fault;
  for (unsigned b = 0; b < grid; b += beside) run_blocks(b);
  return nullptr;
}
void* at(unsigned address) {
  if (address >= sizeof(Block::memory)) fail("an address beyond shared memory");
  return shared + address;
}
void cp_async(unsigned to, const void* from, unsigned size, unsigned valid) {
  if (to % size || uintptr_t(from) % size) fail("a misaligned asynchronous copy");
  order::settle();
  Copy c{at(to), order::on ? order::seen(from, valid, false) : from, size, valid, false};
  if (lazy) fibers[current].groups.back().push_back(c);
  else carry_out(c);
}
void commit() { fibers[current].groups.emplace_back(); }
template <typename Groups> void drain(Groups& groups, size_t pending) {
  while (groups.size() > pending + 1) {
    for (const auto& one : groups.front()) carry_out(one);
    groups.pop_front();
  }
}
void wait_group(size_t pending) { drain(fibers[current].groups, pending); }
static Block& mine() { return blocks[current / width]; }
static Mbarrier& mbarrier(unsigned address) {
  auto found = mine().mbarriers.find(address);
  if (found == mine().mbarriers.end()) fail("an mbarrier that was not initialized");
  return found->second;
}
void mbarrier_init(unsigned address, unsigned count) {
  if (address % 8 || !count) fail("a misaligned mbarrier, or one without arrivals");
  mine().mbarriers[address] = {count, count, 0, 0, {}, false, {}};
  fibers[current].initialized.push_back(address);
}
void mbarrier_fence() {
  for (unsigned address : fibers[current].initialized) mbarrier(address).fenced = true;
  fibers[current].initialized.clear();
}
void fence() {
  order::settle();
  if (order::on) order::fence();
}
void proxy_fence() {
  order::settle();
  if (order::on) order::proxy_fence();
}
void proxy_fence_shared() {
  mbarrier_fence();
  if (order::on) order::proxy_fence_shared();
}
void mbarrier_arrive(unsigned address, int64_t announced) {
  order::settle();
  if (order::on) order::give(current, mbarrier(address).knowledge);
  mbarrier(address).bytes += announced;
  arrived(mine(), address, 1, 0);
}
// Until the phase of this parity is complete: of the current and the one before, the one that has it.
void mbarrier_wait(unsigned address, unsigned parity) {
  while (mbarrier(address).phase % 2 == parity) {
    fibers[current].barrier = address;
    wait(kPhase);
  }
  order::take(current, mbarrier(address).knowledge);
}
unsigned mbarrier_test(unsigned address, unsigned parity) {
  yield();
  if (mbarrier(address).phase % 2 == parity) return 0;
  order::take(current, mbarrier(address).knowledge);
  return 1;
}
static Block& block_at(unsigned address) {
  unsigned rank = (address >> 24) - 1, first = current / width / cluster * cluster;
  if (rank >= cluster) fail("a block that the cluster does not have");
  bool ended = true;  // with its last thread
  for (unsigned i = 0; i < width; ++i) ended &= fibers[(first + rank) * width + i].state == kDone;
  if (ended) fail("a block that has ended");
  return blocks[first + rank];
}
static void later(Block& block, unsigned address, Later work) {
  if (!block.mbarriers.count(address)) fail("an mbarrier that was not initialized");
  if (work.bytes && !block.mbarriers.at(address).fenced) fail("bytes at an mbarrier with no fence behind its beginning");
  if (lazy) block.mbarriers.at(address).later.push_back(std::move(work));
  else deliver(block, address, work);
}
static void later(unsigned address, Later work) { later(mine(), address, std::move(work)); }
void send(unsigned to, uint32_t word, unsigned barrier) {
  constexpr unsigned kOffset = (1 << 24) - 1;
  if (to % 4 || to >> 24 != barrier >> 24) fail("a word that is misaligned or counted in another block");
  Block& block = block_at(to);
  if ((to & kOffset) >= sizeof block.memory) fail("an address beyond shared memory");
  sent.push_back(word);
  later(block, barrier & kOffset, {{{block.memory + (to & kOffset), &sent.back(), 4, 4, true}}, 0, 4});
}
void cp_async_arrive(unsigned address) {
  Later work{{}, 1, 0};
  for (auto& group : fibers[current].groups) {
    work.copies.insert(work.copies.end(), group.begin(), group.end());
    group.clear();
  }
  later(address, std::move(work));
}
void bulk_copy(unsigned to, const void* from, unsigned size, unsigned address) {
  if (to % 16 || uintptr_t(from) % 16 || size % 16) fail("a misaligned bulk copy");
  at(to + size - 1);
  order::settle();
  if (order::on) order::overwritten(at(to), size), from = order::seen(from, size, true);
  later(address, {{{at(to), from, size, size, true}}, 0, size});
}
// The same to the blocks of the cluster whose bits are set, in each at the same place and barrier.
void multicast(unsigned to, const void* from, unsigned size, unsigned address, unsigned blocks) {
  if (to % 16 || uintptr_t(from) % 16 || size % 16) fail("a misaligned bulk copy");
  if (blocks >> cluster) fail("a block that the cluster does not have");
  if (order::on) fail("memory order of a multicast, which is not emulated");
  at(to + size - 1);
  for (unsigned rank = 0; rank < cluster; ++rank)
    if (blocks >> rank & 1) {
      Block& block = block_at(mapa(to, rank));
      later(block, address, {{{block.memory + to, from, size, size, true}}, 0, size});
    }
}
template <typename E> float element(uint32_t word, int half_index) {
  E value;
  uint16_t bits = word >> (16 * half_index);
  memcpy(&value, &bits, 2);
  return (float)value;
}
// kind 0: float16, 1: bfloat16, 2: tf32. A: 16 rows x 8 words, B: 8 words x 8 columns.
void mma(int kind, float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2,
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
struct Tf32 {                           // float32, of which products see 10 bits of mantissa
  uint32_t bits;
  operator float() const { return as_float(bits & 0xffffe000); }
};
// Value k of row r of an operand.
template <typename E> float operand(uint64_t descriptor, bool across, unsigned r, unsigned k) {
  constexpr unsigned size = sizeof(E), each = 16 / size;
  auto field = [&](int bit) { return unsigned(descriptor >> bit & 0x3fff) << 4; };
  unsigned mode = descriptor >> 62, address = field(0) + r / 8 * field(32);
  if (descriptor >> 49 & 7 || mode > 1) fail("a descriptor that the emulation does not know");
  if (across) {
    if (mode != 1 || size != 2) fail("wgmma: an operand that cannot be read across");
    address = field(0) + r / 64 * field(16) + k / 8 * field(32) + k % 8 * 128 + r % 64 * 2;
    address ^= (address >> 7 & 7) << 4;
  } else if (mode == 0) address += r % 8 * 16 + k / each * field(16) + k % each * size;
  else address += r % 8 * 128 + k * size, address ^= (address >> 7 & 7) << 4;
  if (order::on && order::unfenced(at(address))) return NAN;
  E value;
  memcpy(&value, at(address), size);
  return (float)value;
}
template <typename E> void multiply(const Product& p) {
  unsigned lane = current % 32, warp = current % width % 128 / 32;
  constexpr unsigned depth = 32 / sizeof(E);
  if (p.held && sizeof(E) != 2) fail("wgmma: TF32 in registers is not known");
  float a[2][16], b[2][16];
  const Slot* s = p.held ? exchange({{p.rows[0], p.rows[1], p.rows[2], p.rows[3]}}) : nullptr;
  for (unsigned k = 0; k < depth; ++k)
    for (unsigned u = 0; u < 2; ++u)
      if constexpr (sizeof(E) == 2) {
        a[u][k] = s ? element<E>(s[lane / 4 * 4 + k % 8 / 2].words[k / 8 * 2 + u], k % 2)
                    : operand<E>(p.a, p.across, warp * 16 + u * 8 + lane / 4, k);
      } else {
        a[u][k] = operand<E>(p.a, p.across, warp * 16 + u * 8 + lane / 4, k);
      }
  for (unsigned n = 0; n < p.d.size() / 4; ++n) {
    for (unsigned k = 0; k < depth; ++k)
      for (unsigned c = 0; c < 2; ++c) b[c][k] = operand<E>(p.b, p.across, n * 8 + lane % 4 * 2 + c, k);
    for (unsigned i = 0; i < 4; ++i) {
      float& d = *p.d[n * 4 + i];
      double sum = p.keep ? d : 0;
      for (unsigned k = 0; k < depth; ++k) sum += double(a[i / 2][k]) * b[i % 2][k];
      d = (float)sum;
    }
  }
}
static void carry_out(const Product& p) {
  p.kind == 2 ? multiply<Tf32>(p) : p.kind ? multiply<nv_bfloat16>(p) : multiply<half>(p);
}
// Reads its operands at once where copies come late, and when it is waited for where they come at once.
static void issue(Product p) {
  if (lazy) carry_out(p);
  else fibers[current].products.back().push_back(std::move(p));
}
void wgmma(int kind, unsigned columns, uint64_t a, uint64_t b, bool keep, std::initializer_list<float*> d,
           bool across) {
  if (d.size() != columns / 2) fail("wgmma: accumulators");
  issue({kind, a, b, keep, across, false, {}, d});
}
void wgmma_registers(int kind, unsigned columns, std::initializer_list<uint32_t> a, uint64_t b, bool keep,
                            std::initializer_list<float*> d) {
  if (d.size() != columns / 2) fail("wgmma: accumulators");
  Product p{kind, 0, b, keep, false, true, {}, d};
  std::copy(a.begin(), a.end(), p.rows);
  issue(std::move(p));
}
void wgmma_commit() { fibers[current].products.emplace_back(); }
void wgmma_wait(size_t pending) { drain(fibers[current].products, pending); }
void ldmatrix(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned address) {
  unsigned lane = current % 32;
  const Slot* s = exchange({{address}});
  uint32_t* r[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) memcpy(r[i], (char*)at(s[i * 8 + lane / 4].words[0]) + lane % 4 * 4, 4);
}
void ldmatrix_transposed(uint32_t& a, uint32_t& b, uint32_t& c, uint32_t& d, unsigned address) {
  if (address % 16) fail("ldmatrix: a misaligned row");
  unsigned lane = current % 32;
  const Slot* s = exchange({{address}});
  uint32_t* r[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i)
    for (int e = 0; e < 2; ++e)
      memcpy((char*)r[i] + e * 2, (char*)at(s[i * 8 + lane % 4 * 2 + e].words[0]) + lane / 4 * 2, 2);
}
}  // namespace emu

int __shfl_sync(uint, int value, int source, int) {
  return (int)emu::exchange({{(uint32_t)value}})[source].words[0];
}
unsigned __ballot_sync(uint, int value) {
  const emu::Slot* s = emu::exchange({{value != 0}});
  unsigned all = 0;
  for (unsigned lane = 0; lane < 32; ++lane) all |= s[lane].words[0] << lane;
  return all;
}
float __shfl_xor_sync(uint, float value, int mask) {
  unsigned lane = emu::current % 32;
  return emu::as_float(emu::exchange({{emu::as_word(value)}})[lane ^ mask].words[0]);
}
