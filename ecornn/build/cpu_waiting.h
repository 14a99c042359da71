// How threads of a team wait for each other: spinning for a moment, since the others are mostly about to come, then
// asleep, since they cannot come while this thread has their processor. None yields: where other programs run, too,
// that costs their time slices, and a thread that sleeps is let in as soon as it is woken.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <memory>

namespace ecornn {

constexpr int64_t kLate = 10'000;    // nanoseconds of spinning until a thread asks whether it is in another's way
constexpr int64_t kSpin = 200'000;   // until it sleeps: some ten times what sleeping and waking up take
constexpr int kPauses = 32;          // between two looks at the clock

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

// A counter that threads wait on.
class Signal {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void Advance() {
    value_.fetch_add(1);  // sequentially consistent, as is sleepers_: one of the two sees the other
    if (sleepers_.load() > 0) syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // `late` is called once where spinning was in vain at first.
  template <typename Late>
  void WaitWhile(uint32_t old, Late late) {
    if (Spun(old, kLate)) return;
    late();
    if (Spun(old, kSpin - kLate)) return;
    sleepers_.fetch_add(1);
    while (value_.load() == old) syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
  }

 private:
  bool Spun(uint32_t old, int64_t nanoseconds) const {
    for (int64_t end = 0;;) {
      for (int i = 0; i < kPauses; ++i) {
        if (value() != old) return true;
        Pause();
      }
      const int64_t now = Now();
      if (end == 0) end = now + nanoseconds;
      if (now >= end) return false;
    }
  }

  alignas(64) std::atomic<uint32_t> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

// Where threads wait until all of them have come; how many these are, each of them says.
class Barrier {
 public:
  // `last` is called by the one that comes last, before the others go on.
  template <typename Late, typename Last>
  void Wait(int count, Late late, Last last) {
    if (count == 1) return;
    uint32_t round = released_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      arrived_.store(0, std::memory_order_relaxed);
      last();
      released_.Advance();
    } else {
      released_.WaitWhile(round, late);
    }
  }

  template <typename Late>
  void Wait(int count, Late late) {
    Wait(count, late, [] {});
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  Signal released_;
};

// Tasks between two barriers, a share for each thread, of which those who are done with their own take what is left: threads
// are not equally fast where others use their cores, too.
class Shares {
 public:
  explicit Shares(int size) : size_(size), taken_(new Taken[size]) {}

  // One of the tasks 0 .. total - 1 that nobody has, or `total` where there is none.
  int64_t Take(int index, int64_t total) {
    if (!used_.load(std::memory_order_relaxed)) used_.store(true, std::memory_order_relaxed);
    for (int i = 0; i < size_; ++i) {
      const int of = index + i < size_ ? index + i : index + i - size_;
      const int64_t begin = total * of / size_, count = total * (of + 1) / size_ - begin;
      std::atomic<int64_t>& taken = taken_[of].count;
      if (taken.load(std::memory_order_relaxed) >= count) continue;
      const int64_t number = taken.fetch_add(1, std::memory_order_relaxed);
      if (number < count) return begin + number;
    }
    return total;
  }

  // By one thread while the others wait.
  void Renew() {
    if (!used_.load(std::memory_order_relaxed)) return;
    for (int i = 0; i < size_; ++i) taken_[i].count.store(0, std::memory_order_relaxed);
    used_.store(false, std::memory_order_relaxed);
  }

 private:
  struct alignas(64) Taken {
    std::atomic<int64_t> count{0};
  };

  const int size_;
  const std::unique_ptr<Taken[]> taken_;
  std::atomic<bool> used_{false};
};

// Which processor each thread of a team runs on. Schedulers like to wake a thread beside the one that
// wakes it, and leave it there although other processors idle; at a barrier a step that costs more than
// the step. Such a thread moves away; the caller's own thread is never moved.
class Seats {
 public:
  explicit Seats(int size) : size_(size), cpus_(new std::atomic<int>[size]) {
    for (int i = 0; i < size; ++i) cpus_[i].store(-1, std::memory_order_relaxed);
  }

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
    for (int i = 0; i < size_; ++i) {
      const int taken = cpus_[i].load(std::memory_order_relaxed);
      if (taken >= 0 && taken < CPU_SETSIZE) CPU_CLR(taken, &free);
    }
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return;
    cpus_[index].store(sched_getcpu(), std::memory_order_relaxed);
    sched_setaffinity(0, sizeof allowed, &allowed);  // a moment there is enough
  }

  const int size_;
  const std::unique_ptr<std::atomic<int>[]> cpus_;
};

}  // namespace ecornn
