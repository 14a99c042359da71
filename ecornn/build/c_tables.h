// What c_tables.py says of a module, read once.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "c_kinds.h"
#include "ecornn.h"
#include "number_tables.h"

namespace ecornn_c {

// See Packing in ecornn/program.py.
struct Packing {
  bool optional;  // only what a call may leave out reads it
  Stored kind;
  std::vector<std::pair<int64_t, int64_t>> sources;  // parameter, gate; parameter -1: zeros
  std::vector<int64_t> pad, split, order;
};

struct Pointer {
  Kind kind;
  int64_t index;  // of the state, the parameter, the packing or what is kept
  int64_t part;   // of a state: the number of the sequence
  int64_t fixed, per_step;  // bytes of a workspace
};

struct Kept {
  int64_t fixed, per_step, itemsize;  // elements, for the compiled batch
};

class Tables : ecornn::NumberTables {
 public:
  // `data`: what c_tables.py made, which stays.
  Tables(const unsigned char* data, const char* manifest) : NumberTables(data) {
    auto& d = description;
    layer = Number() != 0;
    d.size = sizeof d;
    d.manifest = manifest;
    d.device_type = static_cast<DLDeviceType>(Number());
    d.dtype = Type();
    d.gradient_dtype = Type();
    for (int64_t* size : {&d.input, &d.hidden, &d.batch, &d.longest, &y_width}) *size = Number();
    for (int32_t* size : {&d.layers, &d.directions, &d.lengths, &d.resets, &d.sequences, &d.training}) {
      *size = static_cast<int32_t>(Number());
    }
    d.cell = String();
    arch = String();
    for (int64_t n = Number(); n > 0; --n) flags.push_back(String());
    for (int64_t n = Number(); n > 0; --n) states.push_back(String());
    for (int64_t n = Number(); n > 0; --n) {
      ecornn_parameter p{String(), 0, {1, 1}};
      gates.push_back(Number());
      p.ndim = static_cast<int32_t>(Number());
      for (int axis = 0; axis < p.ndim; ++axis) p.shape[axis] = Number();
      parameters.push_back(p);
    }
    for (int64_t n = Number(); n > 0; --n) packings.push_back(ReadPacking());
    for (int64_t n = Number(); n > 0; --n) {
      kept.emplace_back();
      for (int64_t* size : {&kept.back().fixed, &kept.back().per_step, &kept.back().itemsize}) *size = Number();
    }
    for (auto& entry : entries) {
      for (int64_t n = Number(); n > 0; --n) {
        Pointer p{};
        p.kind = static_cast<Kind>(Number());
        for (int64_t* field : {&p.index, &p.part, &p.fixed, &p.per_step}) *field = Number();
        entry.push_back(p);
      }
    }
    d.state_count = static_cast<int32_t>(states.size());
    d.states = states.data();
    d.parameter_count = static_cast<int32_t>(parameters.size());
    d.parameters = parameters.data();
  }
  Tables(const Tables&) = delete;

  bool cuda() const { return description.device_type == kDLCUDA; }
  int64_t itemsize() const { return description.dtype.bits / 8; }
  int64_t count() const { return int64_t{description.layers} * description.directions; }  // L*D

  bool layer;  // whether its entries are those of a layer
  ecornn_description description{};
  const char* arch;
  int64_t y_width;  // values of a row of y
  std::vector<const char*> flags;  // what the CPU must have, as /proc/cpuinfo names it
  std::vector<const char*> states;
  std::vector<ecornn_parameter> parameters;
  std::vector<int64_t> gates;  // of each parameter: its first axis is gates * H
  std::vector<Packing> packings;
  std::vector<Kept> kept;
  std::vector<Pointer> entries[3];  // run, forward, backward

 private:
  DLDataType Type() {
    const auto code = static_cast<uint8_t>(Number());
    return {code, static_cast<uint8_t>(Number()), 1};
  }

  Packing ReadPacking() {
    Packing p{};
    p.optional = Number() != 0;
    p.kind = static_cast<Stored>(Number());
    for (int64_t n = Number(); n > 0; --n) {
      const int64_t parameter = Number();
      p.sources.emplace_back(parameter, Number());
    }
    for (auto* axes : {&p.pad, &p.split, &p.order}) {
      for (int64_t n = Number(); n > 0; --n) axes->push_back(Number());
    }
    return p;
  }
};

}  // namespace ecornn_c
