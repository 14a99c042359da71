// Threads that carry out a call: those of the process's OpenMP runtime, or a team of our own, which all modules share.
#pragma once
#include <tvm/ffi/c_api.h>

#include <alloca.h>
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_openmp.h"
#include "cpu_waiting.h"

namespace ecornn {

constexpr int kScalars = 4;  // thread, threads, T, B come before a worker's pointers

using Worker = int (*)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);

// One worker that runs on threads 0 .. size-1, of which each calls Work.
class Round {
 public:
  // `args`: `count` of them; the first two are each thread's own.
  Round(Worker worker, const TVMFFIAny* args, int count, int size)
      : worker_(worker), args_(args), count_(count), seats_(size), shares_(size) {}

  void Work(int index, int size);

  // Called by a thread that works: waits for the others.
  void Wait(int index, int size) {
    barrier_.Wait(size, [&] { seats_.Take(index); }, [&] { shares_.Renew(); });
  }

  // A task between two barriers that no other thread has; `total` where all are taken.
  int64_t Take(int index, int64_t total) { return shares_.Take(index, total); }

  bool failed() const { return failed_.load(); }

 private:
  const Worker worker_;
  const TVMFFIAny* const args_;
  const int count_;
  Seats seats_;
  Shares shares_;
  Barrier barrier_;
  std::atomic<bool> failed_{false};
};

// What the thread works on, for ecornn_barrier and ecornn_take; no round where it is alone, but the tasks it took itself.
struct Place {
  Round* round;
  int index, size;
  int64_t taken = 0;
};
inline thread_local Place current{};

inline void Round::Work(int index, int size) {
  auto* args = static_cast<TVMFFIAny*>(alloca(sizeof(TVMFFIAny) * count_));
  std::copy(args_, args_ + count_, args);
  args[0].v_int64 = index;
  args[1].v_int64 = size;
  TVMFFIAny result{};
  const Place outer = current;
  current = {this, index, size};
  seats_.Take(index);
  if (worker_(nullptr, args, count_, &result) != 0) failed_.store(true);
  current = outer;
}

// On the calling thread alone: without memory of its own, and without a lock, for callers that have deadlines. The first two
// of `args` are written.
inline bool Alone(Worker worker, TVMFFIAny* args, int count) {
  args[0].v_int64 = 0;
  args[1].v_int64 = 1;
  TVMFFIAny result{};
  Place& here = current;
  const Place outer = here;
  here = {nullptr, 0, 1};
  const int code = worker(nullptr, args, count, &result);
  here = outer;
  return code == 0;
}

// What each thread of a team does, and what a team is asked for, also by other modules: nonzero where no thread can be
// started. A later version that is not alike has another name.
using Body = void (*)(void* data, int index);
using RunTeam = int (*)(Body body, void* data, int size);
constexpr char kRunTeam[] = "ecornn_run_team_1";
extern "C" int ecornn_run_team_1(Body body, void* data, int size);

// Threads of our own, made when they are first needed. They sleep between calls.
class Team {
 public:
  ~Team() {
    stop_ = true;
    for (auto& member : members_) {
      member.start.Advance();
      member.thread.join();
    }
  }

  // On `size` threads, this one among them.
  void Run(Body body, void* data, int size) {
    while (static_cast<int>(members_.size()) + 1 < size) {
      const int index = static_cast<int>(members_.size()) + 1;
      Member& member = members_.emplace_back();
      try {
        member.thread = std::thread([this, index, &member] { Loop(index, member.start); });
      } catch (...) {
        members_.pop_back();
        throw;
      }
    }
    body_ = body;
    data_ = data;
    size_ = size;
    for (int i = 0; i + 1 < size; ++i) members_[i].start.Advance();
    body(data, 0);
    finished_.Wait(size, [] {});
  }

 private:
  struct Member {
    Signal start;
    std::thread thread;
  };

  void Loop(int index, Signal& start) {
    for (uint32_t seen = 0;; ++seen) {
      start.WaitWhile(seen, [] {});
      if (stop_) return;
      const int size = size_;
      body_(data_, index);
      finished_.Wait(size, [] {});
    }
  }

  std::deque<Member> members_;  // they stay where they are
  Barrier finished_;
  Body body_ = nullptr;
  void* data_ = nullptr;
  int size_ = 1;
  std::atomic<bool> stop_{false};
};

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

// The teams of the module that was loaded first: threads of several modules would spin in each other's way.
class TeamFinder {
 public:
  RunTeam Find() {
    std::call_once(once_, [this] {
      std::vector<std::string> names;
      dl_iterate_phdr([](dl_phdr_info* info, size_t, void* out) {
        if (info->dlpi_name && *info->dlpi_name) static_cast<std::vector<std::string>*>(out)->emplace_back(info->dlpi_name);
        return 0;
      }, &names);
      for (const std::string& name : names) {
        void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
        const auto found = library ? reinterpret_cast<RunTeam>(dlsym(library, kRunTeam)) : nullptr;
        if (found && found != found_) {
          found_ = found;  // never closed: it stays as long as its threads may be needed
          return;
        }
        if (library) dlclose(library);
        if (found) return;  // this module's own
      }
    });
    return found_;
  }

 private:
  std::once_flag once_;
  RunTeam found_ = ecornn_run_team_1;
};

// The calls that run in this process, so that each takes its part of the cores. A loader that has several modules gives
// all of them the same counter.
class Calls {
 public:
  void Share(std::atomic<int>* counter, int cores) {
    counter_.store(counter);
    cores_.store(cores);
  }
  std::atomic<int>& counter() const { return *counter_.load(); }
  int cores() const { return cores_.load(); }

 private:
  std::atomic<int> own_{0};
  std::atomic<std::atomic<int>*> counter_{&own_};
  std::atomic<int> cores_{static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))};
};

// What all calls of a module share, in storage of its own: a forked child has none of the threads, and forgets them.
class Process {
 public:
  Process() {
    new (pool_) Pool;
    pthread_atfork(nullptr, nullptr, [] { get().Fork(); });
  }
  ~Process() { pool().~Pool(); }

  static Process& get();
  Pool& pool() { return *std::launder(reinterpret_cast<Pool*>(pool_)); }
  OpenMPFinder& openmp() { return openmp_; }
  RunTeam team() { return teams_.Find(); }
  Calls& calls() { return calls_; }

 private:
  void Fork() {
    new (pool_) Pool;
    openmp_.Fork();
    calls_.counter().store(0);
  }

  alignas(Pool) unsigned char pool_[sizeof(Pool)];
  OpenMPFinder openmp_;
  TeamFinder teams_;
  Calls calls_;
};

inline Process process;
inline Process& Process::get() { return process; }

// A call while it runs.
class Running {
 public:
  Running() : counter_(process.calls().counter()), count_(counter_.fetch_add(1) + 1) {}
  ~Running() { counter_.fetch_sub(1); }
  Running(const Running&) = delete;

  // Its part of `threads` threads: all of them where no other call runs.
  int Share(int threads) const {
    return count_ == 1 ? threads : std::min(threads, std::max(1, process.calls().cores() / count_));
  }

 private:
  std::atomic<int>& counter_;
  const int count_;
};

// How many threads pay where others want the cores, too: at a barrier all wait for one that is not let in. So the calling
// thread looks at how long it was ready and had no processor: where that was a fifth of the time that it ran there are half
// as many threads the next time, else twice as many. Where the kernel does not say, it is how often it was put off: every
// few milliseconds. With ECORNN_CROWDED=off in the environment nobody looks.
class Crowding {
 public:
  // `most`, or fewer.
  int Limit(int most) {
    static const char* const wanted = getenv("ECORNN_CROWDED");
    rusage used;
    if ((wanted && !strcmp(wanted, "off")) || getrusage(RUSAGE_THREAD, &used) != 0) return most;
    const double ran = Seconds(used.ru_utime) + Seconds(used.ru_stime);
    if (ran_ < 0) {  // what it did before is another matter
      Note(ran, Waited(), used.ru_nivcsw);
    } else if (ran - ran_ >= kWindow) {
      const double waited = Waited();
      const bool crowded = waited >= 0 ? waited - waited_ >= kShare * (ran - ran_)
                                       : static_cast<double>(used.ru_nivcsw - switches_) * kWindow >= ran - ran_;
      limit_ = crowded ? std::max(1, std::min(limit_, most) / 2) : std::min(limit_ * 2, 1 << 16);
      Note(ran, waited, used.ru_nivcsw);
    }
    return std::min(most, limit_);
  }

 private:
  static constexpr double kWindow = 4e-3;  // seconds of a thread's own time: one or two of the kernel's slices
  static constexpr double kShare = 0.2;
  static double Seconds(const timeval& time) { return time.tv_sec + 1e-6 * time.tv_usec; }

  // Seconds that this thread was ready and another one had its processor; negative where that is not known.
  static double Waited() {
    char text[96];
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    const ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (length <= 0) return -1;
    text[length] = 0;
    unsigned long long ran, waited;
    return sscanf(text, "%llu %llu", &ran, &waited) == 2 ? 1e-9 * static_cast<double>(waited) : -1;
  }

  void Note(double ran, double waited, long switches) {
    ran_ = ran;
    waited_ = waited;
    switches_ = switches;
  }

  double ran_ = -1, waited_ = -1;
  long switches_ = 0;
  int limit_ = 1 << 16;
};
inline thread_local Crowding crowding;

// Runs a worker on `size` threads, or on fewer where there are fewer; whether all did what they had to. Throws where no
// thread can be started.
inline bool Run(Worker worker, TVMFFIAny* args, int count, int size) {
  if (size == 1) return Alone(worker, args, count);
  Round round(worker, args, count, size);
  if (const OpenMP openmp = process.openmp().Find(); openmp.Complete()) {
    struct Region {
      Round& round;
      const OpenMP& openmp;
      const int size;
      Barrier finished;
    } region{round, openmp, size, {}};
    openmp.Run([](void* data) {
      auto* of = static_cast<Region*>(data);
      const int index = of->openmp.thread_num(), size = std::min(of->size, of->openmp.num_threads());
      if (index >= size) return;
      of->round.Work(index, size);
      of->finished.Wait(size, [] {});  // the runtime's own way of waiting for the end is to spin for milliseconds
    }, &region, size);
    return !round.failed();
  }
  struct Seat {
    Round& round;
    const int size;
  } seat{round, size};
  const int refused = process.team()([](void* data, int index) {
    auto* of = static_cast<Seat*>(data);
    of->round.Work(index, of->size);
  }, &seat, size);
  if (refused) throw std::system_error(refused, std::generic_category(), "no thread can be started");
  return !round.failed();
}

}  // namespace ecornn
