// What threads see of each other's stores to global memory: as little as the PTX memory model promises.
//
// Every word keeps all that was stored there. A load returns the oldest value that it may: not older than what its thread
// has read or stored there before, nor than what it knows of. It knows of its own stores, and of what others knew when
// they released: at a fence before the store that it read (and a fence of its own behind the load), at a red.release (and
// an ld.acquire), at a barrier. Values that stay old would stop a poll, so a load that found one several times finds the
// next. Bulk copies read through another proxy: they find what was stored before a proxy fence of its thread, which the
// copying thread knew of at its last one.
// Of shared memory only proxies are looked at: who read what a bulk copy goes over, or who starts that copy, has had a
// proxy fence since, and wgmma finds no number in what was written since that of its thread.
//
// Kernels are compiled with -fsanitize=thread, whose calls before each load and store end here. Memory itself has the
// last value of each word, but while a thread loads an older one.
#include "memory_order.h"

#include "cuda_on_cpu.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <unordered_map>

namespace order {
constexpr unsigned kPatience = 3;        // loads that find the same old value
using Address = uintptr_t;
struct Store { uint32_t value; unsigned thread, number; std::shared_ptr<const Knowledge> released; };
using History = std::vector<Store>;      // of a word; the first entry is what was there before all threads began
struct Place { size_t index; unsigned times; };
struct View {
  Knowledge knows, read;                 // and what it read that others had released, known behind its next fence
  std::vector<unsigned> async;           // stores that its bulk copies find
  std::shared_ptr<const Knowledge> released;  // what it knew at its last fence
  std::unordered_map<Address, Place> last;    // of each word: what it read or stored
  unsigned number = 0;
  uint64_t fenced = 0;                   // when it last had a proxy fence for shared memory
};
bool on;
static std::vector<View> views;
static std::unordered_map<Address, History> words;
static std::vector<std::pair<Address, uint32_t>> older;  // words that show an old value, and their last one
static struct { Address at; unsigned size, thread; } storing;
static std::deque<std::vector<char>> found;              // by copies under way
// Of shared memory, by 16 bytes: when they were written; and of what bulk copies brought, who read it when.
static std::unordered_map<Address, uint64_t> writes;
static std::unordered_map<Address, std::vector<std::pair<unsigned, uint64_t>>> reads;
static uint64_t now;

static uint32_t& word(Address at) { return *(uint32_t*)at; }
static void join(std::vector<unsigned>& to, const std::vector<unsigned>& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}
static void join(Knowledge& to, const Knowledge& from) {
  join(to.stores, from.stores), join(to.fenced, from.fenced);
}
static View& mine() { return views[emu::current]; }
static Knowledge nothing() { return {std::vector<unsigned>(views.size()), std::vector<unsigned>(views.size())}; }

void begin(unsigned threads) {
  views.assign(threads, {});
  words.clear(), found.clear(), reads.clear(), writes.clear(), older.clear();
  storing.size = 0;
  for (View& v : views) v.knows = v.read = nothing(), v.async.assign(threads, 0);
}
static void append(Address at, uint32_t value, unsigned thread, std::shared_ptr<const Knowledge> released) {
  View& v = views[thread];
  History& history = words[at];
  v.knows.stores[thread] = ++v.number;
  history.push_back({value, thread, v.number, std::move(released)});
  v.last[at] = {history.size() - 1, 0};
}
void settle() {
  for (auto [at, value] : older) word(at) = value;
  older.clear();
  unsigned size = storing.size;
  storing.size = 0;
  for (Address at = storing.at & ~Address(3); size && at < storing.at + size; at += 4)
    append(at, word(at), storing.thread, views[storing.thread].released);
}
// The first of a word's values that a thread with this knowledge may find.
static size_t oldest(const History& history, const std::vector<unsigned>& known, size_t from) {
  size_t i = history.size() - 1;
  while (i > from && known[history[i].thread] < history[i].number) --i;
  return i;
}
static const Store& load(Address at, const History& history) {
  View& v = mine();
  Place& last = v.last[at];
  size_t from = oldest(history, v.knows.stores, last.index);
  if (from > last.index) last = {from, 0};
  else if (last.index + 1 < history.size() && ++last.times > kPatience) last = {last.index + 1, 0};
  return history[last.index];
}
static void reading(Address from, unsigned size) {
  settle();
  for (Address at = from & ~Address(3); at < from + size; at += 4) {
    auto history = words.find(at);
    if (history == words.end()) continue;
    const Store& s = load(at, history->second);
    if (s.released) join(mine().read, *s.released);
    if (&s == &history->second.back()) continue;
    older.emplace_back(at, word(at));
    word(at) = s.value;
  }
}
static void writing(Address to, unsigned size) {
  settle();
  for (Address at = to & ~Address(3); at < to + size; at += 4) {
    History& history = words[at];
    if (history.empty()) history.push_back({word(at), 0, 0, nullptr});
  }
  storing = {to, size, emu::current};
}
void give(unsigned thread, Knowledge& to) {
  if (to.stores.empty()) to = nothing();
  join(to, views[thread].knows);
}
void take(unsigned thread, const Knowledge& from) {
  if (!from.stores.empty()) join(views[thread].knows, from);
}
void meet(unsigned first, unsigned end) {
  Knowledge all = nothing();
  for (unsigned i = first; i < end; ++i) give(i, all);
  for (unsigned i = first; i < end; ++i) views[i].knows = all;
}
void fence() {
  View& v = mine();
  join(v.knows, v.read);
  v.released = std::make_shared<Knowledge>(v.knows);
}
void proxy_fence() {
  View& v = mine();
  join(v.async, v.knows.fenced);
  join(v.knows.fenced, v.knows.stores);
}
void proxy_fence_shared() { mine().fenced = ++now; }
const void* seen(const void* from, unsigned size, bool async) {
  View& v = mine();
  Address begin = Address(from);
  char* own = nullptr;
  for (Address at = begin & ~Address(3); at < begin + size; at += 4) {
    auto history = words.find(at);
    if (history == words.end()) continue;
    size_t i = async ? oldest(history->second, v.async, 0) : &load(at, history->second) - &history->second[0];
    if (!own) {
      found.emplace_back((const char*)from, (const char*)from + size);
      own = found.back().data();
    }
    for (unsigned k = 0; k < 4; ++k)
      if (at + k >= begin && at + k < begin + size) own[at + k - begin] = ((const char*)&history->second[i].value)[k];
  }
  return own ? own : from;
}
static void read(Address from, unsigned size) {
  for (Address at = from / 16; at <= (from + size - 1) / 16; ++at) {
    auto known = reads.find(at);
    if (known != reads.end()) known->second.emplace_back(emu::current, ++now);
  }
}
void copied(const void* to, unsigned size) {
  for (Address at = Address(to) / 16; at <= (Address(to) + size - 1) / 16; ++at) writes[at] = ++now;
}
void overwritten(const void* to, unsigned size) {
  for (Address at = Address(to) / 16; at < (Address(to) + size) / 16; ++at) {
    for (auto [thread, time] : reads[at])
      if (time > std::max(views[thread].fenced, mine().fenced))
        emu::fail("a bulk copy over what was read, and no proxy fence between");
    reads[at].clear();
    writes.erase(at);
  }
}
bool unfenced(const void* from) {
  auto time = writes.find(Address(from) / 16);
  return time != writes.end() && time->second > mine().fenced;
}
static bool in(const void* at, const void* from, size_t size) {
  return at >= from && (const char*)at < (const char*)from + size;
}
static void access(void* at, unsigned size, bool store) {
  if (!on || emu::on_stack(at)) return;
  if (!in(at, emu::shared, emu::kShared)) return store ? writing(Address(at), size) : reading(Address(at), size);
  store ? copied(at, size) : read(Address(at), size);
}
}  // namespace order

namespace emu {
void add(unsigned* to, unsigned value, bool release) {
  if (!order::on) return void(*to += value);
  using namespace order;
  settle();
  writing(Address(to), 4);
  storing.size = 0;
  View& v = mine();
  auto all = std::make_shared<Knowledge>(release ? v.knows : v.released ? *v.released : nothing());
  const Store& before = words[Address(to)].back();
  if (before.released) join(*all, *before.released);
  *to += value;
  append(Address(to), *to, current, nullptr);
  if (release) all->stores[current] = v.number;
  words[Address(to)].back().released = all;
}
unsigned acquire(const unsigned* from) {
  if (!order::on) return *from;
  using namespace order;
  settle();
  auto history = words.find(Address(from));
  if (history == words.end()) return *from;
  const Store& s = load(Address(from), history->second);
  if (s.released) join(mine().knows, *s.released);
  return s.value;
}
}  // namespace emu

// What -fsanitize=thread calls.
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define ACCESS(size) \
  void __tsan_read##size(void* at) { order::access(at, size, false); } \
  void __tsan_write##size(void* at) { order::access(at, size, true); } \
  void __tsan_unaligned_read##size(void* at) { order::access(at, size, false); } \
  void __tsan_unaligned_write##size(void* at) { order::access(at, size, true); }
ACCESS(1) ACCESS(2) ACCESS(4) ACCESS(8) ACCESS(16)
void __tsan_read_range(void* at, unsigned long size) { order::access(at, size, false); }
void __tsan_write_range(void* at, unsigned long size) { order::access(at, size, true); }
}
