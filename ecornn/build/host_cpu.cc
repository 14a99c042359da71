// Runs sequences on a team of threads, one after the other. program.h, generated beside this file, lists for each entry
// the workers (packed functions by TVM's LLVM code generator) and the pointers that each is given.
//
// Threads of a team are created on first use. They spin for a moment and then sleep, both between
// calls and at barriers, so that nothing is busy after a call. Calls from several threads at once get
// a team each.

#include <tvm/ffi/c_api.h>

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <memory>
#include <new>
#include <condition_variable>
#include <mutex>
#include <exception>
#include <thread>
#include <vector>

#define ECORNN_EXPORT extern "C" __attribute__((visibility("default")))
#define ECORNN_DECLARE(name) \
  extern "C" int name(void* self, const TVMFFIAny* args, int32_t count, TVMFFIAny* result);

struct Call {
  int (*worker)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
  const int* pointers;  // numbers among those of the entry
  int count;
  int most;  // threads; 0: any number
};

#include "program.h"

extern "C" {
extern const unsigned char ecornn_manifest[];
extern const unsigned long long ecornn_manifest_size;
}

namespace {

constexpr int kScalars = 4;     // thread, threads, T, B
constexpr int kPauses = 512;    // spinning: some 10 us
constexpr int kYields = 256;    // then letting others run, should this core have two of the threads
constexpr int64_t kMaxThreads = 1024;

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A counter that threads wait on: first spinning, then asleep.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void Advance() {
    value_.fetch_add(1);  // sequentially consistent, as is sleepers_: one of the two sees the other
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      changed_.notify_all();
    }
  }

  // `late` is called once where spinning was in vain.
  template <typename Late>
  void WaitWhile(uint32_t old, Late late) {
    for (int i = 0; i < kPauses; ++i) {
      if (value() != old) return;
      Pause();
    }
    late();
    for (int i = 0; i < kYields; ++i) {
      if (value() != old) return;
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    changed_.wait(lock, [&] { return value_.load() != old; });
    sleepers_.fetch_sub(1);
  }

 private:
  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Barrier {
 public:
  void Reset(int count) { count_ = count; }

  template <typename Late>
  void Wait(Late late) {
    uint32_t round = released_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      arrived_.store(0, std::memory_order_relaxed);
      released_.Advance();
    } else {
      released_.WaitWhile(round, late);
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  int count_ = 1;
  Signal released_;
};

// Which processor each thread of a team runs on. Schedulers like to wake a thread beside the one that
// wakes it, and leave it there although other processors idle; at a barrier a step that costs more than
// the step. Such a thread moves away; the caller's own thread is never moved.
class Seats {
 public:
  explicit Seats(int size) : cpus_(size) {
    for (auto& cpu : cpus_) cpu.store(-1, std::memory_order_relaxed);
  }

  int size() const { return static_cast<int>(cpus_.size()); }

  void Take(int index) {
    cpus_[index].store(sched_getcpu(), std::memory_order_relaxed);
    if (index > 0 && Shared(index)) Move(index);
  }

 private:
  bool Shared(int index) const {
    for (int other = 0; other < index; ++other) {
      if (cpus_[other].load(std::memory_order_relaxed) == cpus_[index].load(std::memory_order_relaxed)) return true;
    }
    return false;
  }

  // To any processor that the thread may use and no other thread of the team does, if there is one.
  void Move(int index) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    cpu_set_t free = allowed;
    for (auto& cpu : cpus_) {
      int taken = cpu.load(std::memory_order_relaxed);
      if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
    }
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return;
    cpus_[index].store(sched_getcpu(), std::memory_order_relaxed);
    sched_setaffinity(0, sizeof allowed, &allowed);  // a moment there is enough
  }

  std::vector<std::atomic<int>> cpus_;
};

class Team {
 public:
  ~Team() {
    stop_ = true;
    start_.Advance();
    for (auto& thread : threads_) thread.join();
  }

  // Runs the worker on `size` threads, this one among them; 0, or the first thread's error code.
  int Run(int size, const Call& call, const TVMFFIAny* shared) {
    while (static_cast<int>(threads_.size()) + 1 < size) {
      int index = static_cast<int>(threads_.size()) + 1;
      // It waits for the next start, of which there has been none since.
      threads_.emplace_back([this, index, seen = start_.value()] { Loop(index, seen); });
    }
    if (!seats_ || seats_->size() != size) seats_ = std::make_unique<Seats>(size);
    size_ = size;
    args_ = shared;
    call_ = &call;
    barrier_.Reset(size);
    finished_.Reset(static_cast<int>(threads_.size()) + 1);
    failed_.store(false);
    start_.Advance();
    int code = Work(0);
    finished_.Wait([] {});
    if (code == 0 && failed_.load()) {
      TVMFFIErrorSetRaisedFromCStr("RuntimeError", "a thread of the CPU team failed");
      code = -1;
    }
    return code;
  }

  // Called by the thread `index` of the team.
  void Wait(int index) {
    barrier_.Wait([&] { seats_->Take(index); });
  }

 private:
  void Loop(int index, uint32_t seen) {
    for (;;) {
      start_.WaitWhile(seen, [] {});
      seen = start_.value();
      if (stop_) return;
      if (index < size_ && Work(index) != 0) failed_.store(true);
      finished_.Wait([] {});
    }
  }

  int Work(int index);

  std::vector<std::thread> threads_;
  Signal start_;
  Barrier barrier_, finished_;
  std::unique_ptr<Seats> seats_;  // of the threads of the latest call
  const TVMFFIAny* args_ = nullptr;
  const Call* call_ = nullptr;
  int size_ = 1;
  std::atomic<bool> stop_{false}, failed_{false};
};

thread_local Team* current = nullptr;
thread_local int current_index = 0;

int Team::Work(int index) {
  std::vector<TVMFFIAny> args(args_, args_ + kScalars + call_->count);
  args[0].v_int64 = index;
  TVMFFIAny result{};
  current = this;
  current_index = index;
  if (size_ > 1) seats_->Take(index);
  int code = call_->worker(nullptr, args.data(), static_cast<int32_t>(args.size()), &result);
  current = nullptr;
  return code;
}

// Teams that no call uses.
class Pool {
 public:
  std::unique_ptr<Team> Take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Team>();
    auto team = std::move(idle_.back());
    idle_.pop_back();
    return team;
  }

  void Give(std::unique_ptr<Team> team) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(team));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Team>> idle_;
};

// The pool, in storage of its own: a forked child has none of the threads, and forgets them.
class PoolHolder {
 public:
  PoolHolder() {
    new (storage_) Pool;
    pthread_atfork(nullptr, nullptr, [] { new (storage_) Pool; });
  }
  ~PoolHolder() { get().~Pool(); }
  static Pool& get() { return *std::launder(reinterpret_cast<Pool*>(storage_)); }

 private:
  alignas(Pool) static inline unsigned char storage_[sizeof(Pool)];
} holder;

int Fail(const char* kind, const char* message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return -1;
}

TVMFFIAny Integer(int64_t value) {
  TVMFFIAny any{};
  any.type_index = kTVMFFIInt;
  any.v_int64 = value;
  return any;
}

}  // namespace

// Called by generated code: waits for the other threads of the team.
extern "C" __attribute__((visibility("hidden"))) void ecornn_barrier() { current->Wait(current_index); }

// manifest() -> str
ECORNN_EXPORT int __tvm_ffi_manifest(void*, const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  if (count != 0) return Fail("TypeError", "manifest() takes no arguments");
  TVMFFIByteArray text{reinterpret_cast<const char*>(ecornn_manifest), ecornn_manifest_size};
  return TVMFFIStringFromByteArray(&text, result);
}

// name(T, B, device, threads, *pointers) -> None, of an entry that takes so many pointers.
static int Enter(const char* name, const Call* calls, size_t length, int pointers, const TVMFFIAny* args,
                 int32_t count, TVMFFIAny* result) {
  auto refuse = [name](const char* kind, const char* reason) {
    char message[160];
    snprintf(message, sizeof message, "%s(T, B, device, threads, *pointers) %s", name, reason);
    return Fail(kind, message);
  };
  if (count != 4 + pointers) return refuse("TypeError", "got another number of arguments");
  for (int i = 0; i < count; ++i) {
    bool pointer = i >= 4 && args[i].type_index == kTVMFFIOpaquePtr;
    if (args[i].type_index != kTVMFFIInt && !pointer) return refuse("TypeError", "takes integers");
  }
  int64_t steps = args[0].v_int64, batch = args[1].v_int64, threads = args[3].v_int64;
  if (steps < 1 || steps > INT32_MAX || batch < 1 || batch > INT32_MAX) {
    return refuse("ValueError", "got a T or B that is not positive");
  }
  if (threads < 1 || threads > kMaxThreads) return refuse("ValueError", "takes 1 to 1024 threads");
  TVMFFIAny shared[kScalars + kMostPointers] = {Integer(0), Integer(0), Integer(steps), Integer(batch)};
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  try {
    auto team = PoolHolder::get().Take();
    int code = 0;
    for (const Call* each = calls; each != calls + length; ++each) {
      const Call& call = *each;
      for (int i = 0; i < call.count; ++i) {
        TVMFFIAny pointer{};
        pointer.type_index = kTVMFFIOpaquePtr;
        pointer.v_ptr = args[4 + call.pointers[i]].v_ptr;
        shared[kScalars + i] = pointer;
      }
      int size = static_cast<int>(call.most > 0 && call.most < threads ? call.most : threads);
      shared[1] = Integer(size);
      if ((code = team->Run(size, call, shared)) != 0) break;
    }
    PoolHolder::get().Give(std::move(team));
    return code;
  } catch (const std::exception& error) {  // no thread could be started, or no memory
    return Fail("RuntimeError", error.what());
  }
}

// A matrix to be packed: element (row, column) of `from`, contiguous, goes to to[row_at[row] + column_at[column]]. Each
// `run` columns, from one that is a multiple of it on, go to places that follow each other.
struct PackJob {
  int64_t to, from, rows, columns, row_at, column_at, run;
};

static int PackWorker(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  constexpr int64_t kRows = 16, kColumns = 256;  // of a block, whose places stay in the cache
  constexpr int64_t kRun = 8;
  const int64_t thread = args[0].v_int64, threads = args[1].v_int64, count = args[2].v_int64;
  const auto* jobs = static_cast<const PackJob*>(args[kScalars].v_ptr);
  int64_t number = 0;
  for (const PackJob* job = jobs; job != jobs + count; ++job) {
    auto* to = reinterpret_cast<float*>(job->to);
    const auto* from = reinterpret_cast<const float*>(job->from);
    const auto* row_at = reinterpret_cast<const int64_t*>(job->row_at);
    const auto* column_at = reinterpret_cast<const int64_t*>(job->column_at);
    for (int64_t i0 = 0; i0 < job->rows; i0 += kRows) {
      if (number++ % threads != thread) continue;
      const int64_t i1 = i0 + kRows < job->rows ? i0 + kRows : job->rows;
      for (int64_t j0 = 0; j0 < job->columns; j0 += kColumns) {
        const int64_t j1 = j0 + kColumns < job->columns ? j0 + kColumns : job->columns;
        for (int64_t i = i0; i < i1; ++i) {
          const float* row = from + i * job->columns;
          float* place = to + row_at[i];
          if (job->run == kRun) {
            int64_t j = j0;
            for (; j + kRun <= j1; j += kRun) std::memcpy(place + column_at[j], row + j, kRun * sizeof(float));
            for (; j < j1; ++j) place[column_at[j]] = row[j];
          } else {
            for (int64_t j = j0; j < j1; ++j) place[column_at[j]] = row[j];
          }
        }
      }
    }
  }
  return 0;
}

// pack(jobs, count, threads) -> None: `jobs` points to `count` of PackJob, of float32.
ECORNN_EXPORT int __tvm_ffi_pack(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (count != 3) return Fail("TypeError", "pack(jobs, count, threads) got another number of arguments");
  for (int i = 0; i < count; ++i) {
    if (args[i].type_index != kTVMFFIInt) return Fail("TypeError", "pack(jobs, count, threads) takes integers");
  }
  const int64_t threads = args[2].v_int64;
  if (threads < 1 || threads > kMaxThreads) return Fail("ValueError", "pack takes 1 to 1024 threads");
  static const int first = 0;
  static const Call call{PackWorker, &first, 1, 0};
  TVMFFIAny shared[kScalars + 1] = {Integer(0), Integer(threads), args[1], Integer(0), Integer(0)};
  shared[kScalars].type_index = kTVMFFIOpaquePtr;
  shared[kScalars].v_ptr = reinterpret_cast<void*>(args[0].v_int64);
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  try {
    auto team = PoolHolder::get().Take();
    const int code = team->Run(static_cast<int>(threads), call, shared);
    PoolHolder::get().Give(std::move(team));
    return code;
  } catch (const std::exception& error) {
    return Fail("RuntimeError", error.what());
  }
}

#define ECORNN_ENTRY(name, pointers)                                                                             \
  ECORNN_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {           \
    return Enter(#name, name##_calls, std::size(name##_calls), pointers, args, count, result);                   \
  }
ECORNN_ENTRIES(ECORNN_ENTRY)
