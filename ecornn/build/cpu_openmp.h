// The OpenMP runtime that is in the process already, if there is one: GNU's, LLVM's or Intel's. Its threads go on
// spinning for a while after each of its regions, on the processors that threads of our own would need: so it is they
// who do our work. The module is linked against none.
#pragma once
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

namespace ecornn {

// What a runtime exports. All three have the entry points of GNU's; LLVM's may be built without them.
struct OpenMP {
  using Body = void (*)(void*);
  using Microtask = void (*)(int32_t*, int32_t*, void*);

  void (*parallel)(Body, void*, unsigned, unsigned) = nullptr;     // GOMP_parallel
  void (*fork_call)(void*, int32_t, Microtask, ...) = nullptr;     // __kmpc_fork_call
  void (*push_num_threads)(void*, int32_t, int32_t) = nullptr;     // __kmpc_push_num_threads
  int32_t (*global_thread_num)(void*) = nullptr;                   // __kmpc_global_thread_num
  int (*thread_num)() = nullptr;                                   // omp_get_thread_num
  int (*num_threads)() = nullptr;                                  // omp_get_num_threads
  int (*max_threads)() = nullptr;                                  // omp_get_max_threads

  bool Complete() const {
    return thread_num && num_threads && max_threads && (parallel || (fork_call && push_num_threads && global_thread_num));
  }

  // Runs `body` on `threads` threads of the runtime, on more if its other regions have more, since it would end those
  // that a region does not need, or on as many as it gives: one within another region.
  void Run(Body body, void* data, int threads) const {
    threads = std::max(threads, max_threads());
    if (parallel) return parallel(body, data, static_cast<unsigned>(threads), 0);
    struct Place {  // ident_t
      int32_t reserved_1, flags, reserved_2, reserved_3;
      const char* source;
    } place{0, 2, 0, 0, ";unknown;ecornn;0;0;;"};
    struct Both {
      Body body;
      void* data;
    } both{body, data};
    push_num_threads(&place, global_thread_num(&place), threads);
    fork_call(&place, 1, [](int32_t*, int32_t*, void* given) {
      const auto* of = static_cast<const Both*>(given);
      of->body(of->data);
    }, &both);
  }

  static OpenMP Of(void* library) {
    OpenMP found;
    auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find(found.parallel, "GOMP_parallel");
    find(found.fork_call, "__kmpc_fork_call");
    find(found.push_num_threads, "__kmpc_push_num_threads");
    find(found.global_thread_num, "__kmpc_global_thread_num");
    find(found.thread_num, "omp_get_thread_num");
    find(found.num_threads, "omp_get_num_threads");
    find(found.max_threads, "omp_get_max_threads");
    return found;
  }
};

// Finds it, again whenever libraries have come or gone.
class OpenMPFinder {
 public:
  // None in a process that was forked: threads of the runtime are not there any more, which GNU's does not notice. Nor
  // where ECORNN_OPENMP=off is in the environment.
  OpenMP Find() {
    if (forked_) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    Loaded now;
    dl_iterate_phdr([](dl_phdr_info* info, size_t size, void* out) {
      auto* loaded = static_cast<Loaded*>(out);
      if (size >= offsetof(dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs) *loaded = {info->dlpi_adds, info->dlpi_subs};
      return 1;  // each says the same
    }, &now);
    if (!(now == seen_)) {
      seen_ = now;
      found_ = Search();
    }
    return found_;
  }

  void Fork() { forked_ = true; }

 private:
  struct Loaded {
    unsigned long long adds = 0, subs = 0;
    bool operator==(const Loaded& other) const { return adds == other.adds && subs == other.subs; }
  };

  static OpenMP Search() {
    const char* wanted = getenv("ECORNN_OPENMP");
    if (wanted && !strcmp(wanted, "off")) return {};
    // What all libraries see, as one that was preloaded, is what PyTorch calls, too; then what PyTorch was linked with.
    OpenMP found = OpenMP::Of(RTLD_DEFAULT);
    if (found.Complete()) return found;
    std::vector<std::string> names;
    dl_iterate_phdr([](dl_phdr_info* info, size_t, void* out) {
      if (info->dlpi_name) static_cast<std::vector<std::string>*>(out)->emplace_back(info->dlpi_name);
      return 0;
    }, &names);
    for (const char* part : {"libtorch_cpu", "libgomp", "libiomp", "libomp"}) {
      for (const std::string& name : names) {
        if (name.substr(name.find_last_of('/') + 1).rfind(part, 0) != 0) continue;
        void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_NOLOAD);  // never closed: it stays
        if (library && (found = OpenMP::Of(library)).Complete()) return found;
      }
    }
    return {};
  }

  // Whether the process is a fork of another one, also of before this library was loaded (PF_FORKNOEXEC).
  static bool Forked() {
    char text[512];
    const int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    const ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (length <= 0) return false;
    text[length] = 0;
    const char* after = strrchr(text, ')');
    unsigned flags = 0;
    return after && sscanf(after + 1, " %*c %*d %*d %*d %*d %*d %u", &flags) == 1 && (flags & 0x40);
  }

  std::mutex mutex_;
  Loaded seen_;
  OpenMP found_;
  bool forked_ = Forked();
};

}  // namespace ecornn
