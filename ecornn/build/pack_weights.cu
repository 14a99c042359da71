// Packs weights that lie on a GPU, as ecornn/program.py says of a Packing; c_device_pack.h makes the
// tables. A warp makes a piece of a packed buffer, 16 bytes a thread at a time: what it reads are parts of a few rows.

constexpr int kAtOnce = 2;  // of the 16 bytes that a thread makes
constexpr int kMany = 8;    // of single elements

struct Work {
  unsigned long long place;  // of the piece's first element among the rows of all gates (high half), and in its row
  int job, piece;            // which of the job's pieces
};

struct Job {
  unsigned long long to;   // the packed buffer
  int kind;                // 0: float32, 1: float16, 2: bfloat16, 3: tf32
  int size, places;        // elements of a piece, and where the table has how far each is from the first one
  int rows, columns;       // of a source, without padding
  unsigned padded, magic;  // rows with padding, and 2^32 / padded, rounded up
  int sources, gates;      // the first one, and how many there are; behind them there are zeros
  int alike;               // 1: each 16 bytes of a piece come from such places as its first ones, farther on;
                           // 2: sources have rows of their own, which are behind them, each in place of a parameter
};

struct Source {
  int parameter, gate;  // parameter -1: zeros
};

struct Parameters {
  const void* at[128];  // null: zeros
};

struct alignas(16) Words {
  unsigned word[4];
};

template <int kType>
__device__ float loaded(const void* from, long long at) {
  if (kType == 0) return ((const float*)from)[at];
  const unsigned bits = ((const unsigned short*)from)[at];
  if (kType == 2) return __uint_as_float(bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}

// Two neighbours, aligned to both.
template <int kType>
__device__ void loaded_pair(const void* from, long long at, float& one, float& other) {
  if (kType == 0) {
    const unsigned long long both = ((const unsigned long long*)from)[at / 2];
    one = __uint_as_float((unsigned)both);
    other = __uint_as_float((unsigned)(both >> 32));
    return;
  }
  const unsigned both = ((const unsigned*)from)[at / 2];
  if (kType == 2) {
    one = __uint_as_float(both << 16);
    other = __uint_as_float(both & 0xffff0000u);
    return;
  }
  asm("cvt.f32.f16 %0, %1;" : "=f"(one) : "h"((unsigned short)both));
  asm("cvt.f32.f16 %0, %1;" : "=f"(other) : "h"((unsigned short)(both >> 16)));
}

__device__ unsigned rounded(float value, int kind) {
  const unsigned bits = __float_as_uint(value);
  const bool nan = value != value;
  if (kind == 0) return bits;
  if (kind == 2) return nan ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  if (kind == 3) return nan ? bits : bits + 0x1000 & ~0x1fffu;
  unsigned short half_bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half_bits) : "f"(value));
  return half_bits;
}

template <int kType>
__device__ unsigned element(const Job& job, const Source* sources, const Parameters& parameters,
                            unsigned long long place) {
  const unsigned column = (unsigned)place, all = (unsigned)(place >> 32);
  const unsigned gate = job.padded == 1 ? all : (unsigned)((unsigned long long)all * job.magic >> 32);
  const unsigned row = all - gate * job.padded;
  if (gate >= (unsigned)job.gates || column >= (unsigned)job.columns) return 0;
  const int rows = job.alike == 2 ? sources[job.sources + job.gates + gate].parameter : job.rows;
  if (row >= (unsigned)rows) return 0;
  const Source source = sources[job.sources + gate];
  const void* from = source.parameter < 0 ? nullptr : parameters.at[source.parameter];
  if (!from) return 0;
  return rounded(loaded<kType>(from, ((long long)source.gate * rows + row) * job.columns + column), job.kind);
}

// Where 16 bytes of a piece come from: from one place on, if all of them are inside of the same gate.
struct Origin {
  const void* from;
  long long at;
  bool whole, there;  // whether all come from there; else whether any might be anywhere
};

// `most_row`, `most_column`: the farthest of them from the first one.
__device__ Origin origin_of(const Job& job, const Source* sources, const Parameters& parameters,
                            unsigned long long place, unsigned most_row, unsigned most_column) {
  const unsigned first = (unsigned)place, all = (unsigned)(place >> 32);
  const unsigned gate = job.padded == 1 ? all : (unsigned)((unsigned long long)all * job.magic >> 32);
  const unsigned first_row = all - gate * job.padded;
  const bool several = first_row + most_row >= job.padded;  // gates
  const bool outside = first_row >= (unsigned)job.rows || first >= (unsigned)job.columns;
  Origin found = {nullptr, 0, false, false};
  if (gate >= (unsigned)job.gates || (outside && !several)) return found;
  const Source source = sources[job.sources + gate];
  if (source.parameter >= 0) found.from = parameters.at[source.parameter];
  found.at = ((long long)source.gate * job.rows + first_row) * job.columns + first;
  found.whole = found.from && first_row + most_row < (unsigned)job.rows && first + most_column < (unsigned)job.columns;
  found.there = several || found.from;
  return found;
}

// One element of a piece.
template <int kType>
__device__ void store_one(const Work& work, const Job& job, int item, float value) {
  const long long to = (long long)work.piece * job.size + item;
  if (job.kind == 1 || job.kind == 2)
    ((unsigned short*)job.to)[to] = (unsigned short)rounded(value, job.kind);
  else
    ((unsigned*)job.to)[to] = rounded(value, job.kind);
}

// Every 32nd element of a piece, kMany of which are loaded before the first is stored: vectors of an odd size are a few
// warps, for which all others would wait.
template <int kType>
__device__ void one_by_one(const Work& work, const Job& job, const Source* sources, const unsigned long long* own,
                           const Parameters& parameters, int lane) {
#pragma unroll 1
  for (int i = lane; i < job.size; i += kMany * 32) {
    const void* from[kMany];
    int at[kMany];
    float loads[kMany];
#pragma unroll
    for (int n = 0; n < kMany; ++n) {
      Origin origin = {nullptr, 0, false, false};
      if (i + n * 32 < job.size)
        origin = origin_of(job, sources, parameters, work.place + own[i + n * 32], 0, 0);
      from[n] = origin.whole ? origin.from : nullptr;
      at[n] = (int)origin.at;
    }
#pragma unroll
    for (int n = 0; n < kMany; ++n) loads[n] = from[n] ? loaded<kType>(from[n], at[n]) : 0.0f;
#pragma unroll
    for (int n = 0; n < kMany; ++n)
      if (i + n * 32 < job.size) store_one<kType>(work, job, i + n * 32, loads[n]);
  }
}

// A thread has what it loads for kAtOnce times 16 bytes under way before it stores the first of them.
template <int kType, int kTogether>
__device__ void piece_alike(const Work& work, const Job& job, const Source* sources, const unsigned long long* own,
                            const Parameters& parameters, int lane) {
  int offset[8];
  unsigned most_row = 0, most_column = 0;
  bool in_row = job.columns % 2 == 0;
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const unsigned long long farther = own[k] - own[0];
    const unsigned row = (unsigned)(farther >> 32), column = (unsigned)farther;
    offset[k] = (int)(row * job.columns + column);
    most_row = max(most_row, row);
    most_column = max(most_column, column);
    in_row = in_row && row == 0 && column == (unsigned)k;
  }
  const long long first = (long long)work.piece * job.size;
  for (int i = kTogether * lane; i < job.size; i += kAtOnce * kTogether * 32) {
    Origin origins[kAtOnce];
    float loads[kAtOnce][8];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int item = i + n * kTogether * 32;
      origins[n] = {nullptr, 0, false, false};
      if (item < job.size)
        origins[n] = origin_of(job, sources, parameters, work.place + own[item], most_row, most_column);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const void* from = origins[n].from;
      const long long at = origins[n].at;
      const bool pairs = in_row && ((unsigned long long)from + at * (kType == 0 ? 4 : 2)) % (kType == 0 ? 8 : 4) == 0;
#pragma unroll
      for (int k = 0; k < kTogether; ++k) loads[n][k] = 0.0f;
      if (origins[n].whole && pairs) {
#pragma unroll
        for (int k = 0; k < kTogether; k += 2) loaded_pair<kType>(from, at + k, loads[n][k], loads[n][k + 1]);
      } else if (origins[n].whole) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) loads[n][k] = loaded<kType>(from, at + offset[k]);
      }
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      const int item = i + n * kTogether * 32;
      if (item >= job.size) break;
      if (origins[n].there && !origins[n].whole) {  // some are outside, or of another gate
#pragma unroll 1
        for (int k = item; k < item + kTogether; ++k) {
          const Origin one = origin_of(job, sources, parameters, work.place + own[k], 0, 0);
          store_one<kType>(work, job, k, one.whole ? loaded<kType>(one.from, one.at) : 0.0f);
        }
        continue;
      }
      unsigned value[8];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) value[k] = rounded(loads[n][k], job.kind);
      Words words;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        words.word[k] = kTogether == 8 ? value[2 * k % 8] | value[(2 * k + 1) % 8] << 16 : value[k];
      *(Words*)(job.to + (first + item) * (16 / kTogether)) = words;
    }
  }
}

template <int kType>
__device__ void piece(const Work& work, const Job& job, const Source* sources, const unsigned long long* places,
                      const Parameters& parameters, int lane) {
  const bool small = job.kind == 1 || job.kind == 2;
  const int together = small ? 8 : 4;
  const long long first = (long long)work.piece * job.size;
  const unsigned long long* own = places + job.places;
  if (job.alike == 1) {
    if (small)
      piece_alike<kType, 8>(work, job, sources, own, parameters, lane);
    else
      piece_alike<kType, 4>(work, job, sources, own, parameters, lane);
    return;
  }
  if (job.size % together) {
    one_by_one<kType>(work, job, sources, own, parameters, lane);
    return;
  }
  for (int i = together * lane; i < job.size; i += together * 32) {
    unsigned value[8];
#pragma unroll
    for (int k = 0; k < 8; ++k)
      if (k < together) value[k] = element<kType>(job, sources, parameters, work.place + own[i + k]);
    Words words;
#pragma unroll
    for (int k = 0; k < 4; ++k) words.word[k] = small ? value[2 * k] | value[2 * k + 1] << 16 : value[k];
    *(Words*)(job.to + (first + i) * (small ? 2 : 4)) = words;
  }
}

extern "C" __global__ void __launch_bounds__(256) ecornn_pack_weights(const Work* works, const Job* jobs, const Source* sources, const unsigned long long* places, int count, int type, Parameters parameters) {
  const int number = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (number >= count) return;
  const Work work = works[number];
  const Job job = jobs[work.job];
  if (type == 0)
    piece<0>(work, job, sources, places, parameters, lane);
  else if (type == 1)
    piece<1>(work, job, sources, places, parameters, lane);
  else
    piece<2>(work, job, sources, places, parameters, lane);
}
