// Weights that lie on a GPU, packed there by the module's kernel: the tables that pack_weights.cu reads.
#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "c_pack.h"
#include "c_tables.h"

namespace ecornn_c {

// The structures of pack_weights.cu.
struct Work {
  uint64_t place;
  int32_t job, piece;
};

struct Job {
  uint64_t to;
  int32_t kind, size, places, rows, columns;
  uint32_t padded, magic;
  int32_t sources, gates, alike;
};

struct Source {
  int32_t parameter, gate;
};

constexpr size_t kPackParameters = 128;  // that one launch takes
constexpr int64_t kPiece = 1024;         // elements that a warp makes; more where that is how long the last axis is

// What one launch packs: tables, and the numbers of the parameters whose addresses it is given.
struct PackLaunch {
  bool optional = false;
  std::vector<Work> works;
  std::vector<Job> jobs;
  std::vector<Source> sources;
  std::vector<uint64_t> places;
  std::vector<int64_t> parameters;
};

inline int64_t ItemSize(Stored kind) {
  return kind == kFloat64 ? 8 : kind == kFloat16 || kind == kBfloat16 ? 2 : 4;
}

// The kernel's number of how weights are stored; -1: it does not know of it.
inline int32_t KernelKind(Stored kind) {
  return kind == kFloat32 ? 0 : kind == kFloat16 ? 1 : kind == kBfloat16 ? 2 : kind == kTf32 ? 3 : -1;
}

// And of a weight's data type.
inline int32_t KernelType(DLDataType type) {
  if (type.code == kDLBfloat) return 2;
  return type.code != kDLFloat || type.bits == 64 ? -1 : type.bits == 32 ? 0 : 1;
}

struct Axis {
  int64_t size, stride;  // and how far apart in `pad` its neighbours are
};

// The places of all elements of such axes: a row among those of all gates in the high 32 bits, and a column.
inline std::vector<uint64_t> Sums(const std::vector<Axis>& axes, int64_t columns) {
  std::vector<uint64_t> made{0};
  for (const Axis& axis : axes) {
    const auto step = static_cast<uint64_t>(axis.stride % columns ? axis.stride : axis.stride / columns << 32);
    std::vector<uint64_t> next;
    next.reserve(made.size() * static_cast<size_t>(axis.size));
    for (const uint64_t place : made) {
      for (int64_t i = 0; i < axis.size; ++i) next.push_back(place + static_cast<uint64_t>(i) * step);
    }
    made.swap(next);
  }
  return made;
}

// Whether all `together` neighbours lie as the first ones do, later rows and columns behind earlier ones.
inline bool Alike(const std::vector<uint64_t>& places, size_t together) {
  if (places.size() % together) return false;
  for (size_t n = 0; n < places.size(); ++n) {
    const uint64_t first = places[n / together * together], farther = places[n] - first;
    if (places[n] < first || farther != places[n % together] - places[0]) return false;
    if (farther >> 32 >= 1 << 16 || (farther & 0xffffffff) >= uint64_t{1} << 31) return false;
  }
  return true;
}

// 2^32 / divisor, rounded up, where the high half of its product with a number below most * divisor is the quotient.
inline std::optional<uint32_t> Magic(uint64_t divisor, uint64_t most) {
  const uint64_t magic = ((uint64_t{1} << 32) + divisor - 1) / divisor;
  for (uint64_t n = 0; divisor > 1 && n < most; ++n) {
    if (((n + 1) * divisor - 1) * magic >> 32 != n) return std::nullopt;
  }
  return static_cast<uint32_t>(magic);
}

// Adds a packing to a launch; false where the kernel cannot do it.
inline bool AddPacking(const Tables& tables, const Packing& packing, int64_t to, PackLaunch* launch) {
  const auto& pad = packing.pad;
  if (KernelKind(packing.kind) < 0 || (pad.size() != 2 && pad.size() != 3)) return false;
  Job job{};
  job.to = static_cast<uint64_t>(to);
  job.kind = KernelKind(packing.kind);
  job.sources = static_cast<int32_t>(launch->sources.size());
  job.gates = static_cast<int32_t>(packing.sources.size());
  std::vector<int32_t> rows(packing.sources.size(), -1);
  if (rows.empty()) return false;
  int32_t known = pad.size() == 3 ? 0 : 1;  // rows of the first matrix, for places without one
  bool any = false;
  for (size_t n = 0; n < packing.sources.size(); ++n) {
    const auto& [parameter, gate] = packing.sources[n];
    const auto at = std::find(launch->parameters.begin(), launch->parameters.end(), parameter);
    const auto number = static_cast<int32_t>(at - launch->parameters.begin());
    launch->sources.push_back({parameter < 0 ? -1 : number, static_cast<int32_t>(std::max<int64_t>(gate, 0))});
    if (parameter < 0) continue;
    if (at == launch->parameters.end()) launch->parameters.push_back(parameter);
    const ecornn_parameter& p = tables.parameters[static_cast<size_t>(parameter)];
    const int64_t first = gate < 0 ? p.shape[0] : p.shape[0] / tables.gates[static_cast<size_t>(parameter)];
    const auto columns = static_cast<int32_t>(p.ndim > 1 ? p.shape[1] : first);
    if (any && columns != job.columns) return false;
    rows[n] = static_cast<int32_t>(p.ndim > 1 ? first : 1);
    if (!any) known = rows[n];
    job.columns = columns;
    any = true;
  }
  std::replace(rows.begin(), rows.end(), -1, known);
  job.rows = *std::max_element(rows.begin(), rows.end());
  const bool mixed = job.rows != *std::min_element(rows.begin(), rows.end());
  if (mixed) {  // each gate has rows of its own, which the kernel finds behind the sources
    for (const int32_t count : rows) launch->sources.push_back({count, 0});
  }
  job.padded = static_cast<uint32_t>(pad.size() == 3 ? pad[1] : 1);
  const std::optional<uint32_t> magic = Magic(job.padded, static_cast<uint64_t>(pad[0]));
  if (!magic) return false;
  job.magic = *magic;

  const int64_t columns = pad.back();
  std::vector<Axis> axes, inner;
  for (const int64_t axis : packing.order) {
    axes.push_back({packing.split[static_cast<size_t>(axis)], Product(packing.split, static_cast<size_t>(axis) + 1)});
    if (axes.back().stride % columns && columns % (axes.back().stride * axes.back().size)) return false;
  }
  for (int64_t room = kPiece; !axes.empty() && room > 1;) {
    const Axis axis = axes.back();
    axes.pop_back();
    int64_t part = axis.size;
    if (!inner.empty()) {
      part = std::min(axis.size, room);
      while (axis.size % part) --part;
    }
    inner.insert(inner.begin(), {part, axis.stride});
    if (part < axis.size) {
      axes.push_back({axis.size / part, axis.stride * part});
      break;
    }
    room /= part;
  }
  const std::vector<uint64_t> pieces = Sums(axes, columns), places = Sums(inner, columns);
  job.size = static_cast<int32_t>(places.size());
  job.places = static_cast<int32_t>(launch->places.size());
  job.alike = mixed ? 2 : Alike(places, static_cast<size_t>(16 / ItemSize(packing.kind)));
  for (size_t n = 0; n < pieces.size(); ++n) {
    launch->works.push_back({pieces[n], static_cast<int32_t>(launch->jobs.size()), static_cast<int32_t>(n)});
  }
  launch->places.insert(launch->places.end(), places.begin(), places.end());
  launch->jobs.push_back(job);
  return true;
}

// The launches that pack all of a module's buffers, packing n to to[n], those for what a call may leave out apart; none
// where the kernel cannot do one of them.
inline std::vector<PackLaunch> PackLaunches(const Tables& tables, const std::vector<int64_t>& to) {
  std::vector<PackLaunch> made;
  for (const bool optional : {false, true}) {
    for (size_t n = 0; n < tables.packings.size(); ++n) {
      const Packing& packing = tables.packings[n];
      if (packing.optional != optional) continue;
      const bool begun = !made.empty() && made.back().optional == optional;
      std::vector<int64_t> with = begun ? made.back().parameters : std::vector<int64_t>{};
      for (const auto& [parameter, gate] : packing.sources) {
        if (parameter >= 0 && std::find(with.begin(), with.end(), parameter) == with.end()) with.push_back(parameter);
      }
      if (!begun || with.size() > kPackParameters) made.emplace_back().optional = optional;
      if (!AddPacking(tables, packing, to[n], &made.back())) return {};
      if (made.back().parameters.size() > kPackParameters) return {};
    }
  }
  return made;
}

}  // namespace ecornn_c
