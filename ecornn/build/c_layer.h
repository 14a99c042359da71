// A layer: packed weights where the module's code runs, zero states, and workspaces that no call uses.
#pragma once
#include <sys/syscall.h>
#include <tvm/ffi/c_api.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "c_device_pack.h"
#include "c_pack.h"
#include "c_tables.h"
#include "c_tensor.h"

extern "C" {
using Function = int (*)(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
extern Function const ecornn_functions[8];  // FUNCTIONS of c_tables.py
}

namespace ecornn_c {

enum Name { kRun, kForward, kBackward, kPack, kAlloc, kFree, kCopy, kSynchronize };

constexpr int64_t kAlignment = 256;  // of workspaces and packed weights

inline int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

inline TVMFFIAny Integer(int64_t value) {
  TVMFFIAny any{};
  any.type_index = kTVMFFIInt;
  any.v_int64 = value;
  return any;
}

inline int64_t Address(const void* at) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(at)); }

// A function of the module that failed has its error in a place of the thread's own.
inline int32_t Raised(const Failure& fail, const char* what) {
  TVMFFIObjectHandle raised = nullptr;
  TVMFFIErrorMoveFromRaised(&raised);
  if (!raised) return fail(ECORNN_FAILED, "%s failed", what);
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(raised);
  const int32_t code = fail(ECORNN_FAILED, "%s: %.*s", what, static_cast<int>(std::min<size_t>(cell->message.size, 400)),
                            cell->message.data);
  TVMFFIObjectDecRef(raised);
  return code;
}

template <typename... Numbers>
int32_t Call(const Failure& fail, Name name, const char* what, TVMFFIAny* result, Numbers... numbers) {
  const TVMFFIAny args[] = {Integer(static_cast<int64_t>(numbers))...};
  return ecornn_functions[name](nullptr, args, sizeof...(numbers), result) ? Raised(fail, what) : ECORNN_OK;
}

// Memory where the module runs.
class Memory {
 public:
  Memory(bool cuda, int32_t device) : cuda_(cuda), device_(device) {}
  Memory(const Memory&) = delete;
  ~Memory() {
    TVMFFIAny none{};
    if (cuda_ && at_) Call(Failure(nullptr), kFree, "freeing", &none, device_, at_);
    if (!cuda_) std::free(reinterpret_cast<void*>(at_));
  }

  int32_t Make(const Failure& fail, int64_t bytes) {
    bytes = std::max(Aligned(bytes), kAlignment);
    if (cuda_) {
      TVMFFIAny made{};
      if (const int32_t code = Call(fail, kAlloc, "device memory", &made, device_, bytes)) return code;
      at_ = made.v_int64;
    } else {
      at_ = Address(std::aligned_alloc(kAlignment, static_cast<size_t>(bytes)));
    }
    return at_ ? ECORNN_OK : fail(ECORNN_MEMORY, "%" PRId64 " bytes: there is not enough memory", bytes);
  }

  // Host to here, on a GPU in the order of the stream; complete when this returns.
  int32_t Write(const Failure& fail, const void* from, int64_t bytes, void* stream, int64_t offset = 0) {
    const int64_t to = at_ + offset;
    if (!cuda_) {
      memcpy(reinterpret_cast<void*>(to), from, static_cast<size_t>(bytes));
      return ECORNN_OK;
    }
    TVMFFIAny none{};
    const int64_t queue = Address(stream);
    if (const int32_t code = Call(fail, kCopy, "a copy", &none, device_, to, Address(from), bytes, queue)) return code;
    return Call(fail, kSynchronize, "a copy", &none, device_, queue);
  }

  int64_t at() const { return at_; }

 private:
  const bool cuda_;
  const int32_t device_;
  int64_t at_ = 0;
};

struct Workspace : Memory {
  Workspace(bool cuda, int32_t device, int64_t most_steps, int64_t most_rows, void* users)
      : Memory(cuda, device), steps(most_steps), rows(most_rows), stream(users) {}

  const int64_t steps, rows;  // of the calls that it has room for
  void* const stream;         // that orders its users, on a GPU
};

// Workspaces that no call uses, without a lock: threads exchange them with places.
class Idle {
 public:
  ~Idle() {
    for (auto& place : places_) delete place.load();
  }

  // One for calls like this, or null.
  Workspace* Take(int64_t steps, int64_t rows, void* stream) {
    for (auto& place : places_) {
      Workspace* found = place.exchange(nullptr, std::memory_order_acq_rel);
      if (!found) continue;
      if (found->stream != stream) {
        Give(found);
      } else if (found->steps >= steps && found->rows >= rows) {
        return found;
      } else {
        delete found;  // for the caller's larger one to take its place
      }
    }
    return nullptr;
  }

  void Give(Workspace* one) {
    for (auto& place : places_) {
      Workspace* none = nullptr;
      if (place.compare_exchange_strong(none, one, std::memory_order_acq_rel)) return;
    }
    delete one;  // more threads than places
  }

 private:
  std::array<std::atomic<Workspace*>, 64> places_{};
};

// Where the elements of sources go in a packed buffer, for the module's own code, cpu_pack.h: the place of an element is
// the sum of its gate's, its row's and its column's.
struct Placing {
  std::vector<int64_t> gates, rows, columns;
  int64_t run = 1;
};

// The number in cpu_pack.h of what becomes of a weight of a data type; -1: none of them.
inline int64_t PackKind(const Packing& packing, DLDataType type) {
  const Stored own = type.bits == 32 ? kFloat32 : type.bits == 64 ? kFloat64 : type.code == kDLBfloat ? kBfloat16 : kFloat16;
  if (packing.kind == own) return own == kFloat32 ? 0 : own == kFloat64 ? -1 : 1;
  return packing.kind != kFloat32 || type.bits != 16 ? -1 : own == kBfloat16 ? 2 : 3;
}

// None (no gates) where no such sum is: an axis of `split` has elements of two of `pad`.
inline Placing PlacingOf(const Packing& packing, DLDataType type) {
  Placing made;
  const auto& pad = packing.pad;
  if (PackKind(packing, type) < 0 || (pad.size() != 2 && pad.size() != 3)) return made;
  for (size_t axis = 0; axis <= pad.size(); ++axis) {
    bool border = false;
    for (size_t n = 0; n <= packing.split.size(); ++n) border |= Product(packing.split, n) == Product(pad, axis);
    if (!border) return made;
  }
  std::vector<int64_t> step(packing.split.size());
  int64_t inner = 1;
  for (size_t n = packing.order.size(); n-- > 0;) {
    step[static_cast<size_t>(packing.order[n])] = inner;
    inner *= packing.split[static_cast<size_t>(packing.order[n])];
  }
  std::vector<int64_t>* of[] = {&made.gates, pad.size() == 3 ? &made.rows : &made.columns, &made.columns};
  for (size_t axis = 0; axis < pad.size(); ++axis) {
    for (int64_t i = 0; i < pad[axis]; ++i) {
      int64_t rest = i * Product(pad, axis + 1), place = 0;
      for (size_t n = packing.split.size(); n-- > 0; rest /= packing.split[n]) place += rest % packing.split[n] * step[n];
      of[axis]->push_back(place);
    }
  }
  if (made.rows.empty()) made.rows.push_back(0);
  const auto together = [](const std::vector<int64_t>& places) {
    for (size_t n = 0; n < places.size(); ++n) {
      if (places[n] != places[n / 8 * 8] + static_cast<int64_t>(n % 8)) return false;
    }
    return true;
  };
  made.run = together(made.columns) ? 8 : together(made.rows) ? -8 : 1;
  return made;
}

// What packs weights again and again on a GPU: the tables there, made once.
class DevicePacking {
 public:
  // Of launches that pack a module's buffers.
  int32_t Make(const Failure& fail, const std::vector<PackLaunch>& launches, int32_t device, void* stream) {
    for (const PackLaunch& launch : launches) {
      const std::pair<const void*, size_t> parts[kTables] = {
          {launch.works.data(), launch.works.size() * sizeof(Work)}, {launch.jobs.data(), launch.jobs.size() * sizeof(Job)},
          {launch.sources.data(), launch.sources.size() * sizeof(Source)},
          {launch.places.data(), launch.places.size() * sizeof(uint64_t)}};
      int64_t starts[kTables], total = 0;
      for (int n = 0; n < kTables; ++n) {
        starts[n] = total;
        total += Aligned(static_cast<int64_t>(parts[n].second));
      }
      auto memory = std::make_unique<Memory>(true, device);
      if (const int32_t code = memory->Make(fail, total)) return code;
      std::vector<TVMFFIAny> args{Integer(device), Integer(0)};
      for (int n = 0; n < kTables; ++n) {
        const auto [from, bytes] = parts[n];
        if (const int32_t code = memory->Write(fail, from, static_cast<int64_t>(bytes), stream, starts[n])) return code;
        args.push_back(Integer(memory->at() + starts[n]));
      }
      args.push_back(Integer(static_cast<int64_t>(launch.works.size())));
      launches_.push_back({std::move(memory), std::move(args), launch.parameters, launch.optional});
    }
    return ECORNN_OK;
  }

  // Contiguous weights of one KernelType, by their addresses in the parameters' order.
  int32_t Pack(const Failure& fail, const int64_t* weights, int32_t type, int32_t parts, void* stream) const {
    for (const Launch& launch : launches_) {
      if (!(parts & (launch.optional ? ECORNN_OPTIONAL : ECORNN_NEEDED))) continue;
      std::vector<TVMFFIAny> args = launch.args;
      args[1] = Integer(Address(stream));
      args.push_back(Integer(type));
      for (const int64_t n : launch.parameters) args.push_back(Integer(weights[n]));
      TVMFFIAny none{};
      if (ecornn_functions[kPack](nullptr, args.data(), static_cast<int32_t>(args.size()), &none)) {
        return Raised(fail, "packing");
      }
    }
    return ECORNN_OK;
  }

 private:
  static constexpr int kTables = 4;
  struct Launch {
    std::unique_ptr<Memory> tables;
    std::vector<TVMFFIAny> args;  // up to the weights' type
    std::vector<int64_t> parameters;
    bool optional;
  };
  std::vector<Launch> launches_;
};

// A matrix for the code of a CPU's module that packs: PackJob of cpu_pack.h.
using PackJob = std::array<int64_t, 8>;

struct Layer : ecornn_layer {
  Layer(const Tables& of, const ecornn_api* functions, int32_t number, int32_t most)
      : ecornn_layer{functions}, tables(of), device(number), threads(most), zeros(of.cuda(), number) {}

  // What the entries take, the packed weights and zeros filled in.
  int32_t Prepare(const Failure& fail) {
    const int64_t states = tables.count() * tables.description.batch * tables.description.hidden * tables.itemsize();
    if (const int32_t code = zeros.Make(fail, states)) return code;
    const std::vector<char> none(static_cast<size_t>(states), 0);
    if (const int32_t code = zeros.Write(fail, none.data(), states, nullptr)) return code;
    for (int entry = 0; entry < 3; ++entry) {
      auto& args = arguments[entry];
      args.assign(4, Integer(0));
      for (const Pointer& p : tables.entries[entry]) {
        args.push_back(Integer(p.kind == kPacked ? packed[static_cast<size_t>(p.index)]->at() : 0));
        if (p.kind != kPacked) given[entry].emplace_back(args.size() - 1, p);
      }
    }
    return ECORNN_OK;
  }

  // Whether the module's kernel packs these: they lie on the GPU, contiguous and of one type that it reads.
  bool PacksThere(const std::vector<Weight>& weights) const {
    if (!tables.cuda() || !ecornn_functions[kPack] || weights.empty()) return false;
    const DLDataType type = weights.front().tensor->dtype;
    return KernelType(type) >= 0 && std::all_of(weights.begin(), weights.end(), [&](const Weight& weight) {
             const DLTensor& t = *weight.tensor;
             return t.device.device_type == kDLCUDA && Same(t.dtype, type) && Contiguous(t);
           });
  }

  // Packs such weights on the stream, which is waited for the first time only, since later calls may be on any.
  int32_t PackThere(const Failure& fail, const std::vector<Weight>& weights, void* stream) {
    const bool first = packed.empty();
    for (size_t n = 0; first && n < tables.packings.size(); ++n) {
      const Packing& packing = tables.packings[n];
      if (const int32_t code = Add(fail, Product(packing.split) * ItemSize(packing.kind))) return code;
    }
    std::vector<int64_t> at;
    for (const Weight& weight : weights) at.push_back(Address(DataOf(*weight.tensor)));
    const DLDataType type = weights.front().tensor->dtype;
    if (const int32_t code = PackAt(fail, at.data(), type, nullptr, ECORNN_NEEDED | ECORNN_OPTIONAL, stream)) return code;
    TVMFFIAny none{};
    return first ? Call(fail, kSynchronize, "packing", &none, device, Address(stream)) : ECORNN_OK;
  }

  // See ecornn_api.
  int32_t PackAt(const Failure& fail, const int64_t* weights, DLDataType type, const uint8_t* changed, int32_t parts,
                 void* stream) {
    if (!ecornn_functions[kPack]) return fail(ECORNN_UNSUPPORTED, "the module has no code that packs weights");
    if (tables.cuda()) {
      if (!device_packing) {
        std::vector<int64_t> to;
        for (const auto& memory : packed) to.push_back(memory->at());
        const std::vector<PackLaunch> launches = PackLaunches(tables, to);
        if (launches.empty()) return fail(ECORNN_UNSUPPORTED, "the module packs weights in a way that its kernel does not know");
        auto made = std::make_unique<DevicePacking>();
        if (const int32_t code = made->Make(fail, launches, device, stream)) return code;
        device_packing = std::move(made);
      }
      return device_packing->Pack(fail, weights, KernelType(type), parts, stream);
    }
    const DLDataType own = tables.description.dtype;
    if (type.code != own.code || type.bits != own.bits) return fail(ECORNN_UNSUPPORTED, "weights of the layer's type alone");
    std::vector<PackJob> jobs;
    const std::vector<Placing>& places = Placings();
    for (size_t n = 0; n < places.size(); ++n) {
      if (places[n].gates.empty()) return fail(ECORNN_UNSUPPORTED, "the module's code cannot pack all that it reads");
      Jobs(n, weights, changed, &jobs);
    }
    return Run(fail, jobs);
  }

  // Packs all weights on the host, into memory that is made the first time.
  int32_t Pack(const Failure& fail, const std::vector<Weight>& weights, void* stream) {
    std::vector<PackJob> jobs;
    std::vector<int64_t> at;
    for (const Weight& weight : weights) at.push_back(Address(DataOf(*weight.tensor)));
    const bool first = packed.empty();
    for (size_t n = 0; n < tables.packings.size(); ++n) {
      const Packing& packing = tables.packings[n];
      if (Placings()[n].gates.empty() || !Plain(packing, weights)) {
        Packer packer(packing, weights);
        if (packer.Infinite()) {
          return fail(ECORNN_NOT_FINITE, "a weight is infinite, and the module's products need finite ones");
        }
        const std::vector<char> made = packer.Pack();
        const auto bytes = static_cast<int64_t>(made.size());
        if (const int32_t code = first ? Add(fail, bytes) : 0) return code;
        if (const int32_t code = packed[n]->Write(fail, made.data(), bytes, stream)) return code;
        continue;
      }
      const int64_t bytes = Product(packing.split) * BytesOf(packing);
      if (first) {
        if (const int32_t code = Add(fail, bytes)) return code;
        memset(reinterpret_cast<void*>(packed[n]->at()), 0, static_cast<size_t>(bytes));
      }
      Jobs(n, at.data(), nullptr, &jobs);
    }
    return Run(fail, jobs);
  }

  const Tables& tables;
  const int32_t device, threads;
  std::vector<std::unique_ptr<Memory>> packed;  // by packing
  std::vector<int64_t> addresses;               // and where these are
  Memory zeros;
  std::vector<TVMFFIAny> arguments[3];
  std::vector<std::pair<size_t, Pointer>> given[3];  // of these, those of a call: position and pointer
  mutable Idle idle;
  std::unique_ptr<DevicePacking> device_packing;  // once weights have been packed there

 private:
  int32_t Add(const Failure& fail, int64_t bytes) {
    packed.push_back(std::make_unique<Memory>(tables.cuda(), device));
    return packed.back()->Make(fail, bytes);
  }

  bool Plain(const Packing& packing, const std::vector<Weight>& weights) const {
    const DLDataType own = tables.description.dtype;
    return std::all_of(packing.sources.begin(), packing.sources.end(), [&](const auto& source) {
      if (source.first < 0) return true;
      const DLTensor& t = *weights[static_cast<size_t>(source.first)].tensor;
      return t.dtype.code == own.code && t.dtype.bits == own.bits && Contiguous(t);
    });
  }

  int64_t BytesOf(const Packing& packing) const { return PackKind(packing, tables.description.dtype) == 1 ? 2 : 4; }

  // By packing; none of a GPU's module, nor of one without code that packs.
  const std::vector<Placing>& Placings() {
    const bool code = !tables.cuda() && ecornn_functions[kPack];
    if (placings.empty()) {
      for (const Packing& packing : tables.packings) {
        placings.push_back(code ? PlacingOf(packing, tables.description.dtype) : Placing{});
      }
    }
    return placings;
  }

  // Adds the matrices of packing `n`, contiguous, of the layer's type, at these addresses; of those alone that have changed.
  void Jobs(size_t n, const int64_t* weights, const uint8_t* changed, std::vector<PackJob>* jobs) const {
    const Packing& packing = tables.packings[n];
    const Placing& placing = placings[n];
    for (size_t s = 0; s < packing.sources.size(); ++s) {
      const auto [parameter, gate] = packing.sources[s];
      if (parameter < 0 || (changed && !changed[parameter])) continue;
      const ecornn_parameter& p = tables.parameters[static_cast<size_t>(parameter)];
      // gate -1: the whole matrix
      const int64_t all = gate < 0 ? p.shape[0] : p.shape[0] / tables.gates[static_cast<size_t>(parameter)];
      const int64_t rows = p.ndim > 1 ? all : 1, columns = p.ndim > 1 ? p.shape[1] : all;
      jobs->push_back({packed[n]->at() + BytesOf(packing) * placing.gates[s],
                       weights[parameter] + tables.itemsize() * std::max<int64_t>(gate, 0) * rows * columns, rows, columns,
                       Address(placing.rows.data()), Address(placing.columns.data()), placing.run,
                       PackKind(packing, tables.description.dtype)});
    }
  }

  int32_t Run(const Failure& fail, const std::vector<PackJob>& jobs) const {
    TVMFFIAny none{};
    return jobs.empty() ? ECORNN_OK : Call(fail, kPack, "packing", &none, Address(jobs.data()), jobs.size(), threads);
  }

  std::vector<Placing> placings;
};

// Whether a word of `text` is `word`; neither case nor '_', '-' and '.' count.
inline bool HasWord(const char* text, const char* word) {
  const auto letter = [](const char** at) {  // the next one that counts
    while (**at == '_' || **at == '-' || **at == '.') ++*at;
    return tolower(static_cast<unsigned char>(**at));
  };
  while (*text) {
    const char* rest = word;
    while (letter(&text) == letter(&rest) && *rest) ++text, ++rest;
    if (!*rest && (!*text || isspace(static_cast<unsigned char>(*text)))) return true;
    text += strcspn(text, " \t\n");
    text += strspn(text, " \t\n");
  }
  return false;
}

// Whether this CPU has all instructions that the module uses; fails with the first that it lacks.
inline int32_t CheckHost(const Failure& fail, const Tables& tables) {
  if (tables.flags.empty()) return ECORNN_OK;
#if defined(__x86_64__)
  // Linux lets processes have the tile registers of AMX that ask for them: see permit_tiles() of host_cpu.py.
  const bool tiles = tables.description.dtype.code == kDLBfloat &&
                     std::any_of(tables.flags.begin(), tables.flags.end(), [](const char* f) { return !strcmp(f, "amx_tile"); });
  if (tiles && syscall(SYS_arch_prctl, 0x1023, 18)) {
    return fail(ECORNN_DEVICE, "the module uses the tile registers of AMX, which Linux does not let this process have");
  }
#endif
  FILE* file = fopen("/proc/cpuinfo", "r");  // streams take a tenth of the time to compile all this
  char* line = nullptr;
  size_t room = 0;
  const char *present = nullptr, *lacking = nullptr;  // none is present where this kernel does not tell
  while (file && !present && getline(&line, &room, file) > 0) {
    if (!strncmp(line, "flags", 5) || !strncmp(line, "Features", 8)) present = strchr(line, ':');
  }
  for (const char* flag : tables.flags) {
    if (present && !lacking && !HasWord(present, flag)) lacking = flag;
  }
  free(line);
  if (file) fclose(file);
  return !lacking ? ECORNN_OK : fail(ECORNN_DEVICE, "the module was compiled for %s and uses %s, which this CPU lacks",
                                     tables.arch, lacking);
}

}  // namespace ecornn_c
