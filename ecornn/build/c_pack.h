// Weights as PyTorch stores them -> packed buffers, on the host. tests/helpers/numpy_packing.py says the same in NumPy.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "c_tables.h"
#include "c_tensor.h"

namespace ecornn_c {

// A weight on the host.
struct Weight {
  const DLTensor* tensor;
  int64_t gates;

  bool wide() const { return tensor->dtype.bits == 64; }

  // A row's first `columns` values, of a vector those from `row` on, to `out`.
  void Row(int64_t row, int64_t columns, double* out) const {
    const DLTensor& t = *tensor;
    const int64_t step = !t.strides ? 1 : t.ndim > 1 ? t.strides[1] : t.strides[0];
    const int64_t start = row * (t.ndim == 1 ? step : t.strides ? t.strides[0] : t.shape[1]);
    const int64_t bytes = t.dtype.bits / 8, apart = step * bytes;
    const char* place = DataOf(t) + start * bytes;
    const auto each = [&](auto value) {
      for (int64_t k = 0; k < columns; ++k, place += apart) out[k] = value(place);
    };
    if (t.dtype.bits == 64) return each(Read<double>);
    if (t.dtype.bits == 32) return each([](const char* at) { return static_cast<double>(Read<float>(at)); });
    return t.dtype.code == kDLBfloat ? each(OfBfloat16) : each(OfFloat16);
  }

 private:
  template <typename T>
  static T Read(const char* place) {
    T value;
    memcpy(&value, place, sizeof value);
    return value;
  }

  static double OfBfloat16(const char* place) {
    const uint32_t word = uint32_t{Read<uint16_t>(place)} << 16;
    return static_cast<double>(Read<float>(reinterpret_cast<const char*>(&word)));
  }

  static double OfFloat16(const char* place) {
    const uint16_t bits = Read<uint16_t>(place);
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                        : exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    return bits >> 15 ? -size : size;
  }
};

inline uint32_t BitsOf(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline uint16_t Bfloat16(double value) {
  const auto single = static_cast<float>(value);
  const uint32_t bits = BitsOf(single);
  if (std::isnan(single)) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint32_t Tf32(double value) {
  const auto single = static_cast<float>(value);
  return std::isnan(single) ? BitsOf(single) : (BitsOf(single) + 0x1000) & 0xffffe000;
}

inline uint16_t Float16(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  if (size < std::ldexp(1, -14)) return static_cast<uint16_t>(sign + std::nearbyint(std::ldexp(size, 24)));
  uint64_t bits;
  memcpy(&bits, &size, sizeof bits);
  bits += (uint64_t{1} << 41) - 1 + (bits >> 42 & 1);  // to the nearest, ties to even; a carry rightly enters the exponent
  return static_cast<uint16_t>(sign + (bits >> 42) - (uint64_t{1023 - 15} << 10));
}

inline int64_t Product(const std::vector<int64_t>& sizes, size_t first = 0) {
  return std::accumulate(sizes.begin() + static_cast<std::ptrdiff_t>(first), sizes.end(), int64_t{1},
                         [](int64_t a, int64_t b) { return a * b; });
}

// Calls visit(place in the packed buffer, place in the padded sources) for each element.
template <typename Visit>
void Permuted(const Packing& packing, Visit visit) {
  const size_t axes = packing.split.size();
  std::vector<int64_t> size(axes), step(axes), at(axes, 0);
  for (size_t n = 0; n < axes; ++n) {
    const auto axis = static_cast<size_t>(packing.order[n]);
    size[n] = packing.split[axis];
    step[n] = Product(packing.split, axis + 1);
  }
  const int64_t inner = size[axes - 1], apart = step[axes - 1];
  int64_t from = 0;
  for (int64_t to = 0, count = Product(packing.split); to < count; to += inner) {
    for (int64_t i = 0; i < inner; ++i) visit(to + i, from + i * apart);
    for (size_t n = axes - 1; n-- > 0;) {
      from += step[n];
      if (++at[n] < size[n]) break;
      from -= step[n] * size[n];
      at[n] = 0;
    }
  }
}

// Weights of integers are multiples of a step for each row, 8, 16 or 21 bits of one, as schedules/cpu/product.py reads them:
//   step = max_k |w[k]| / (2^(bits - 1) - 1),  q[k] = round(w[k] / step).
// Products with 16 and 21 bits are made with words of 32 bits whose upper bits are q, so their packed scale is
// step * 2^(bits - 32). The lower bits of such a word belong to other weights. They are part of what is multiplied, and
// known: q[k] is rounded such that both together are nearest to w[k].
inline double UnitsOf(Stored kind) {
  if (kind == kInt8 || kind == kScale) return 127;
  const int bits = kind == kInt16 || kind == kInt16Scale ? 16 : 21;
  return (std::ldexp(1, bits - 1) - 1) * std::ldexp(1, 32 - bits);
}

class Packer {
 public:
  Packer(const Packing& packing, const std::vector<Weight>& weights)
      : packing_(packing), row_(packing.pad.back()), values_(static_cast<size_t>(Product(packing.pad)), 0.0) {
    const bool matrix = packing.pad.size() == 3;
    const int64_t gate_size = Product(packing.pad, 1);
    for (size_t n = 0; n < packing.sources.size(); ++n) {
      const auto [parameter, gate] = packing.sources[n];
      if (parameter < 0) continue;
      const Weight& weight = weights[static_cast<size_t>(parameter)];
      const DLTensor& t = *weight.tensor;
      const int64_t rows = gate < 0 ? t.shape[0] : t.shape[0] / weight.gates;  // gate -1: the whole matrix
      const int64_t first = std::max<int64_t>(gate, 0) * rows;
      wide_ = wide_ || weight.wide();
      double* place = values_.data() + static_cast<int64_t>(n) * gate_size;
      if (!matrix) weight.Row(first, rows, place);
      for (int64_t row = 0; matrix && row < rows; ++row) weight.Row(first + row, t.shape[1], place + row * row_);
    }
  }

  // An infinite weight would make NaN of what floats make of it.
  bool Infinite() const {
    const bool matters = packing_.kind == kPairs || packing_.kind == kScale || packing_.kind == kInt16Scale ||
                         packing_.kind == kInt21Scale;
    return matters && std::any_of(values_.begin(), values_.end(),
                                  [](double v) { return std::isinf(static_cast<float>(v)); });
  }

  std::vector<char> Pack() {
    switch (packing_.kind) {
      case kFloat64: return Each<double>([](double v) { return v; });
      case kFloat32: return Each<float>([](double v) { return static_cast<float>(v); });
      case kFloat16: return Each<uint16_t>(Float16);
      case kBfloat16: return Each<uint16_t>(Bfloat16);
      case kTf32: return Each<uint32_t>(Tf32);
      case kInt8: return Integers();
      case kScale: case kInt16Scale: case kInt21Scale: return Scales();
      case kInt16: case kInt21: return Words();
      case kBalance: return Rows<float>([this](const double* row) { return Power(row); });
      case kBalanced: Balance(); return Each<float>([](double v) { return static_cast<float>(v); });
      case kPairs: Balance(); return Pairs();
    }
    return {};
  }

 private:
  template <typename T, typename Cast>
  std::vector<char> Each(Cast cast) const {
    std::vector<char> made(values_.size() * sizeof(T));
    Permuted(packing_, [&](int64_t to, int64_t from) {
      const T value = cast(values_[static_cast<size_t>(from)]);
      memcpy(made.data() + to * static_cast<int64_t>(sizeof value), &value, sizeof value);
    });
    return made;
  }

  template <typename T, typename Make>
  std::vector<char> Rows(Make make) const {
    const size_t rows = values_.size() / static_cast<size_t>(row_);
    std::vector<char> made(rows * sizeof(T));
    for (size_t n = 0; n < rows; ++n) {
      const T value = make(values_.data() + n * static_cast<size_t>(row_));
      memcpy(made.data() + n * sizeof value, &value, sizeof value);
    }
    return made;
  }

  // Of a row, NaN where one is in it.
  float Scale(const double* row) const {
    double most = 0;
    for (int64_t k = 0; k < row_; ++k) {
      if (std::isnan(row[k])) return NAN;
      most = std::max(most, std::fabs(row[k]));
    }
    return static_cast<float>(most / UnitsOf(packing_.kind));
  }

  std::vector<char> Scales() const { return Rows<float>([this](const double* row) { return Scale(row); }); }

  std::vector<char> Integers() {
    for (size_t first = 0; first < values_.size(); first += static_cast<size_t>(row_)) {
      const double scale = static_cast<double>(Scale(values_.data() + first)), by = scale > 0 ? scale : 1;
      for (size_t at = first; at < first + static_cast<size_t>(row_); ++at) {
        const double quotient = wide_ ? values_[at] / by : static_cast<double>(static_cast<float>(values_[at] / by));
        const double whole = std::isnan(quotient) ? 0 : std::clamp(std::nearbyint(quotient), -127.0, 127.0);
        values_[at] = whole + 128;
      }
    }
    return Each<uint8_t>([](double v) { return static_cast<uint8_t>(v); });
  }

  static uint32_t Upper(double value, int bits) {
    const double unit = std::ldexp(1, 32 - bits), most = std::ldexp(1, bits - 1);
    return static_cast<uint32_t>(static_cast<int64_t>(std::clamp(std::nearbyint(value / unit), -most, most - 1)) *
                                 static_cast<int64_t>(unit));
  }

  // Groups of 2 or 3, the last axis in the new order, become 1 or 2 words; words come before lanes, the axis before it. Of
  // two the first is shifted up before it is used; of three the third, of 22 bits, is put together of both words' lower 11.
  std::vector<char> Words() {
    for (size_t first = 0; first < values_.size(); first += static_cast<size_t>(row_)) {
      const double scale = static_cast<double>(Scale(values_.data() + first)), by = scale > 0 ? scale : 1;
      for (size_t at = first; at < first + static_cast<size_t>(row_); ++at) {
        const double quotient = values_[at] / by;
        values_[at] = std::isfinite(quotient) ? quotient : 0;
      }
    }
    const size_t axes = packing_.split.size();
    const int64_t group = packing_.split[static_cast<size_t>(packing_.order[axes - 1])], words = group - 1;
    const int64_t lanes = packing_.split[static_cast<size_t>(packing_.order[axes - 2])];
    std::vector<double> moved(values_.size());
    Permuted(packing_, [&](int64_t to, int64_t from) {
      moved[static_cast<size_t>(to)] = values_[static_cast<size_t>(from)];
    });
    const int64_t groups = static_cast<int64_t>(moved.size()) / group;
    std::vector<char> made(static_cast<size_t>(groups * words) * sizeof(uint32_t));
    for (int64_t n = 0; n < groups; ++n) {
      const double* of = moved.data() + n * group;
      uint32_t word[2];
      if (group == 2) {
        const uint32_t lower = Upper(of[0], 16) >> 16;
        word[0] = Upper(of[1] - lower, 16) | lower;
      } else {
        const uint32_t split = Upper(of[2], 22), lower[2] = {split >> 21, split >> 10 & 0x7ff};
        for (int i = 0; i < 2; ++i) word[i] = Upper(of[i] - lower[i], 21) | lower[i];
      }
      for (int64_t i = 0; i < words; ++i) {
        const int64_t to = (n / lanes * words + i) * lanes + n % lanes;
        memcpy(made.data() + to * 4, &word[i], 4);
      }
    }
    return made;
  }

  // The power of two at or below the mean magnitude of what is not zero.
  float Power(const double* row) const {
    double sum = 0;
    int64_t count = 0;
    for (int64_t k = 0; k < row_; ++k) {
      const auto single = static_cast<double>(static_cast<float>(row[k]));
      sum += std::fabs(single);
      count += single != 0;
    }
    const double mean = sum / static_cast<double>(std::max<int64_t>(count, 1));
    if (!(mean > 0) || !std::isfinite(mean)) return 1;
    return static_cast<float>(std::ldexp(1, std::clamp(std::ilogb(mean), -126, 127)));
  }

  void Balance() {
    for (size_t first = 0; first < values_.size(); first += static_cast<size_t>(row_)) {
      const float by = Power(values_.data() + first);
      for (size_t at = first; at < first + static_cast<size_t>(row_); ++at) {
        values_[at] = static_cast<double>(static_cast<float>(values_[at]) / by);
      }
    }
  }

  // Minus the sum of the products of sections 0 and 1, every other one with the opposite sign.
  std::vector<char> Pairs() const {
    const size_t axes = packing_.split.size();
    const int64_t length = packing_.split[axes - 1], sections = packing_.split[axes - 2];
    const int64_t count = static_cast<int64_t>(values_.size()) / (length * sections);
    std::vector<char> made(static_cast<size_t>(count) * sizeof(float));
    for (int64_t n = 0; n < count; ++n) {
      const double* of = values_.data() + n * length * sections;
      double even = 0, odd = 0;
      for (int64_t k = 0; k < length; ++k) (k % 2 ? odd : even) += of[k] * of[length + k];
      const auto value = static_cast<float>(odd - even);
      memcpy(made.data() + n * 4, &value, 4);
    }
    return made;
  }

  const Packing& packing_;
  const int64_t row_;
  std::vector<double> values_;  // stacked and padded
  bool wide_ = false;           // whether a source is float64, in which NumPy would compute then
};

}  // namespace ecornn_c
