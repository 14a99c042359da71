// Runs sequences on threads, one after the other. program.cc, generated for each module, lists for each entry the
// workers and the pointers that each is given.

#include "host_cpu.h"

#include <alloca.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>

#include "cpu_pack.h"
#include "cpu_team.h"
#include "ecornn_blob.h"

namespace {

using ecornn::kScalars;

constexpr int64_t kMaxThreads = 1024;
constexpr double kLeastWork = 1 << 19;  // multiply-adds of a call for each thread: 20 to 50 us, which others would wait

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

TVMFFIAny Pointer(void* value) {
  TVMFFIAny any{};
  any.type_index = kTVMFFIOpaquePtr;
  any.v_ptr = value;
  return any;
}

bool AllIntegers(const TVMFFIAny* args, int count) {
  return std::all_of(args, args + count, [](const TVMFFIAny& arg) { return arg.type_index == kTVMFFIInt; });
}

void ReturnNone(TVMFFIAny* result) {
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
}

// On `size` threads; 0, or what is returned of an error.
int RunWorker(ecornn::Worker worker, TVMFFIAny* args, int count, int size) {
  try {
    if (ecornn::Run(worker, args, count, size)) return 0;
    return Fail("RuntimeError", "a thread of the CPU team failed");
  } catch (const std::exception& error) {  // no thread could be started, or no memory
    return Fail("RuntimeError", error.what());
  }
}

}  // namespace

// Called by generated code: waits for the other threads of the team.
extern "C" __attribute__((visibility("hidden"))) void ecornn_barrier() {
  ecornn::Place& at = ecornn::current;
  at.taken = 0;
  if (at.round) at.round->Wait(at.index, at.size);
}

// Called by generated code: one of `total` tasks that no thread has had since the last barrier, or `total`.
extern "C" __attribute__((visibility("hidden"))) int64_t ecornn_take(int64_t total) {
  ecornn::Place& at = ecornn::current;
  if (at.round) return at.round->Take(at.index, total);
  return at.taken < total ? at.taken++ : total;
}

// Called by other modules of the process: see cpu_team.h.
extern "C" __attribute__((visibility("default"))) int ecornn_run_team_1(ecornn::Body body, void* data, int size) {
  try {
    ecornn::Pool& pool = ecornn::process.pool();
    auto team = pool.Take();
    team->Run(body, data, size);
    pool.Give(std::move(team));
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
}

// manifest() -> str
ECORNN_EXPORT int __tvm_ffi_manifest(void*, const TVMFFIAny*, int32_t count, TVMFFIAny* result) {
  if (count != 0) return Fail("TypeError", "manifest() takes no arguments");
  TVMFFIByteArray text{reinterpret_cast<const char*>(ecornn_manifest.data), ecornn_manifest.size};
  return TVMFFIStringFromByteArray(&text, result);
}

// share(calls, cores) -> None: `calls` points to an int32 that counts the calls that run, of all modules of the process;
// they share `cores`.
ECORNN_EXPORT int __tvm_ffi_share(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  static_assert(sizeof(std::atomic<int>) == sizeof(int32_t) && std::atomic<int>::is_always_lock_free);
  if (count != 2 || !AllIntegers(args, count)) return Fail("TypeError", "share(calls, cores) takes two integers");
  if (args[0].v_int64 == 0 || args[1].v_int64 < 1 || args[1].v_int64 > INT32_MAX) {
    return Fail("ValueError", "share(calls, cores) takes an address and a positive number");
  }
  ecornn::process.calls().Share(reinterpret_cast<std::atomic<int>*>(args[0].v_int64),
                                static_cast<int>(args[1].v_int64));
  ReturnNone(result);
  return 0;
}

// pack(jobs, count, threads) -> None: `jobs` points to `count` of PackJob.
ECORNN_EXPORT int __tvm_ffi_pack(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  if (count != 3) return Fail("TypeError", "pack(jobs, count, threads) got another number of arguments");
  if (!AllIntegers(args, count)) return Fail("TypeError", "pack(jobs, count, threads) takes integers");
  const int64_t threads = args[2].v_int64;
  if (threads < 1 || threads > kMaxThreads) return Fail("ValueError", "pack takes 1 to 1024 threads");
  const auto* jobs = reinterpret_cast<const ecornn::PackJob*>(args[0].v_int64);
  TVMFFIAny shared[kScalars + 1] = {Integer(0), Integer(0), args[1], Integer(0),
                                          Pointer(const_cast<ecornn::PackJob*>(jobs))};
  const ecornn::Running running;
  const int size = std::min(running.Share(static_cast<int>(threads)), ecornn::PackingThreads(jobs, args[1].v_int64));
  ReturnNone(result);
  return RunWorker(ecornn::PackWorker, shared, kScalars + 1, size);
}

int ecornn::Enter(const Entry& entry, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  auto refuse = [name = entry.name](const char* kind, const char* reason) {
    char message[160];
    snprintf(message, sizeof message, "%s(T, B, device, threads, *pointers) %s", name, reason);
    return Fail(kind, message);
  };
  if (count != 4 + entry.pointers) return refuse("TypeError", "got another number of arguments");
  for (int i = 0; i < count; ++i) {
    bool pointer = i >= 4 && args[i].type_index == kTVMFFIOpaquePtr;
    if (args[i].type_index != kTVMFFIInt && !pointer) return refuse("TypeError", "takes integers");
  }
  int64_t steps = args[0].v_int64, batch = args[1].v_int64, threads = args[3].v_int64;
  if (steps < 1 || steps > INT32_MAX || batch < 1 || batch > INT32_MAX) {
    return refuse("ValueError", "got a T or B that is not positive");
  }
  if (threads < 1 || threads > kMaxThreads) return refuse("ValueError", "takes 1 to 1024 threads");
  const Call* const end = entry.calls + entry.length;
  int most = 0;
  for (const Call* call = entry.calls; call != end; ++call) most = std::max(most, call->count);
  auto* shared = static_cast<TVMFFIAny*>(alloca(sizeof(TVMFFIAny) * (kScalars + most)));
  shared[0] = shared[1] = Integer(0);
  shared[2] = Integer(steps);
  shared[3] = Integer(batch);
  const ecornn::Running running;
  for (const Call* call = entry.calls; call != end; ++call) {
    for (int i = 0; i < call->count; ++i) shared[kScalars + i] = Pointer(args[4 + call->pointers[i]].v_ptr);
    const double paying = call->work * static_cast<double>(steps) * static_cast<double>(batch) / kLeastWork;
    int size = running.Share(static_cast<int>(threads));
    if (call->most > 0) size = std::min(size, call->most);
    if (call->work > 0 && paying < size) size = std::max(1, static_cast<int>(paying));
    if (size > 1) size = ecornn::crowding.Limit(size);
    const int code = RunWorker(call->worker, shared, kScalars + call->count, size);
    if (code != 0) return code;
  }
  ReturnNone(result);
  return 0;
}
