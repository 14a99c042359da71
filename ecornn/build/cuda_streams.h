// Streams of our own beside a caller's, for parts of a call that run at the same time.
//
// Every stream of a caller has a set of its own, so that what two callers do, or capture into graphs, never meets. A
// kernel waits only for kernels that were issued before it: whatever the GPU starts first, nothing waits forever.
#pragma once
#include <pthread.h>
#include <stdlib.h>

#include "cuda_driver.h"

namespace ecornn {

constexpr int kMaxLanes = 32;

// Lane 0 is the caller's stream, the others are ours. events[i]: how far lane i had come when it was last marked. What
// runs on lane 0 may itself have lanes beside that: they are the next ones, of whose first only the event is used.
struct LaneSet {
  Stream streams[kMaxLanes];
  Event events[kMaxLanes];
  int count;  // lanes that are complete
  int taken;  // by the calls that are under way
  pthread_mutex_t lock;  // held by the thread that uses them
  LaneSet* next;
};

// The set of `stream`, found in `list` or added to it.
static int find_lanes(LaneSet** list, pthread_mutex_t* lock, Stream stream, LaneSet** out) {
  Locked locked(lock);
  for (*out = *list; *out; *out = (*out)->next)
    if ((*out)->streams[0] == stream) return 0;
  if (!(*out = static_cast<LaneSet*>(calloc(1, sizeof(LaneSet))))) return fail("MemoryError", "out of memory");
  pthread_mutexattr_t again;
  pthread_mutexattr_init(&again);
  pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
  pthread_mutex_init(&(*out)->lock, &again);
  pthread_mutexattr_destroy(&again);
  (*out)->streams[0] = stream;
  (*out)->next = *list;
  *list = *out;
  return 0;
}

// Of a set whose lock is held; what was made stays where a call fails.
static int make_lanes(LaneSet& set, int count) {
  RelaxedCapture relaxed;
  for (; set.count < count; ++set.count) {
    Stream* stream = &set.streams[set.count];
    if (set.count > 0 && !*stream) ECORNN_CALL("", cuStreamCreate, stream, kStreamNonBlocking);
    ECORNN_CALL("", cuEventCreate, &set.events[set.count], kEventDisableTiming);
  }
  return 0;
}

static void destroy_lanes(LaneSet* set) {
  while (set) {
    for (int i = 0; i < kMaxLanes; ++i) {
      if (i > 0 && set->streams[i]) driver.cuStreamDestroy(set->streams[i]);
      if (set->events[i]) driver.cuEventDestroy(set->events[i]);
    }
    LaneSet* next = set->next;
    pthread_mutex_destroy(&set->lock);
    free(set);
    set = next;
  }
}

// The lanes beside a stream during one call. What the lanes were given must be joined, also after an error: a capture
// would be lost otherwise, and memory might be used after the caller's stream is done.
class Lanes {
 public:
  Lanes(LaneSet& set, int count) : set_(set), count_(count), locked_(&set.lock), first_(set.taken) {
    set.taken += count;
  }
  ~Lanes() { set_.taken = first_; }
  int enter() {
    if (first_ + count_ > kMaxLanes) return fail("RuntimeError", "too many branches within branches");
    return make_lanes(set_, first_ + count_);
  }
  Stream operator[](int lane) const { return set_.streams[lane ? first_ + lane : 0]; }

  // Marks how far a lane has come.
  int mark(int lane) {
    ECORNN_CALL("", cuEventRecord, set_.events[first_ + lane], (*this)[lane]);
    return 0;
  }

  // What a lane is given next comes after the last mark of another one.
  int follow(int lane, int other) {
    ECORNN_CALL("", cuStreamWaitEvent, (*this)[lane], set_.events[first_ + other], 0);
    used_[lane] = true;
    return 0;
  }

  // What the caller's stream is given next comes after all lanes. Returns `failed`, or -1: the first error stays.
  int join(int failed) {
    for (int i = 1; i < count_; ++i) {
      if (!used_[i]) continue;
      const char* call = "cuEventRecord";
      Result result = driver.cuEventRecord(set_.events[first_ + i], (*this)[i]);
      if (!result) {
        call = "cuStreamWaitEvent";
        result = driver.cuStreamWaitEvent(set_.streams[0], set_.events[first_ + i], 0);
      }
      if (result && !failed) failed = driver_error(result, call, "");
    }
    return failed;
  }

 private:
  LaneSet& set_;
  int count_;
  Locked locked_;
  const int first_;
  bool used_[kMaxLanes] = {};
};

}  // namespace ecornn
