// Packs weights that lie on a GPU, as ecornn/program.py says of a Packing; ecornn/runtime/device_packing.py makes the
// tables. A warp makes a piece of a packed buffer, 16 bytes a thread at a time: what it reads are parts of a few rows.

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
  int alike;               // whether each 16 bytes of a piece come from such places as its first ones, farther on
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
  if (gate >= (unsigned)job.gates || row >= (unsigned)job.rows || column >= (unsigned)job.columns) return 0;
  const Source source = sources[job.sources + gate];
  const void* from = source.parameter < 0 ? nullptr : parameters.at[source.parameter];
  if (!from) return 0;
  return rounded(loaded<kType>(from, ((long long)source.gate * job.rows + row) * job.columns + column), job.kind);
}

// 16 bytes of what a warp makes, of kTogether elements: `row` and `column` say how far each is from the first one;
// in_row: one behind the other.
template <int kType, int kTogether>
__device__ void alike(const Job& job, const Source* sources, const Parameters& parameters, unsigned long long place,
                      const int (&row)[8], const int (&column)[8], bool in_row, unsigned (&value)[8]) {
  const unsigned first = (unsigned)place, all = (unsigned)(place >> 32);
  const unsigned gate = job.padded == 1 ? all : (unsigned)((unsigned long long)all * job.magic >> 32);
  const unsigned first_row = all - gate * job.padded;
  const void* from = nullptr;
  long long at = 0;
  if (gate < (unsigned)job.gates) {
    const Source source = sources[job.sources + gate];
    if (source.parameter >= 0) from = parameters.at[source.parameter];
    at = ((long long)source.gate * job.rows + first_row) * job.columns + first;
  }
  float loads[8];
  const bool pairs = in_row && from && first_row < (unsigned)job.rows && first + kTogether <= (unsigned)job.columns &&
                     ((unsigned long long)from + at * (kType == 0 ? 4 : 2)) % (kType == 0 ? 8 : 4) == 0;
  if (pairs) {
#pragma unroll
    for (int k = 0; k < kTogether; k += 2) loaded_pair<kType>(from, at + k, loads[k], loads[k + 1]);
  } else {
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const bool there = from && first_row + row[k] < (unsigned)job.rows && first + column[k] < (unsigned)job.columns;
      loads[k] = there ? loaded<kType>(from, at + (row[k] * job.columns + column[k])) : 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < kTogether; ++k) value[k] = rounded(loads[k], job.kind);
}

template <int kType, int kTogether>
__device__ void piece_alike(const Work& work, const Job& job, const Source* sources, const unsigned long long* own,
                            const Parameters& parameters, int lane) {
  int row[8], column[8], most = 0;
  bool in_row = true;
#pragma unroll
  for (int k = 0; k < kTogether; ++k) {
    const unsigned long long farther = own[k] - own[0];
    row[k] = (int)(farther >> 32);
    column[k] = (int)farther;
    most = max(most, row[k]);
    in_row = in_row && row[k] == 0 && column[k] == k;
  }
  const long long first = (long long)work.piece * job.size;
  for (int i = kTogether * lane; i < job.size; i += kTogether * 32) {
    const unsigned long long place = work.place + own[i];
    const unsigned all = (unsigned)(place >> 32);
    const unsigned gate = job.padded == 1 ? all : (unsigned)((unsigned long long)all * job.magic >> 32);
    unsigned value[8];
    if (all - gate * job.padded + most < job.padded) {
      alike<kType, kTogether>(job, sources, parameters, place, row, column, in_row, value);
    } else {  // of several gates
#pragma unroll
      for (int k = 0; k < kTogether; ++k) value[k] = element<kType>(job, sources, parameters, work.place + own[i + k]);
    }
    Words words;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      words.word[k] = kTogether == 8 ? value[2 * k % 8] | value[(2 * k + 1) % 8] << 16 : value[k];
    *(Words*)(job.to + (first + i) * (16 / kTogether)) = words;
  }
}

template <int kType>
__device__ void piece(const Work& work, const Job& job, const Source* sources, const unsigned long long* places,
                      const Parameters& parameters, int lane) {
  const bool small = job.kind == 1 || job.kind == 2;
  const int together = small ? 8 : 4;
  const long long first = (long long)work.piece * job.size;
  const unsigned long long* own = places + job.places;
  if (job.alike) {
    if (small)
      piece_alike<kType, 8>(work, job, sources, own, parameters, lane);
    else
      piece_alike<kType, 4>(work, job, sources, own, parameters, lane);
    return;
  }
  if (job.size % together) {
    for (int i = lane; i < job.size; i += 32) {
      const unsigned value = element<kType>(job, sources, parameters, work.place + own[i]);
      if (small)
        ((unsigned short*)job.to)[first + i] = (unsigned short)value;
      else
        ((unsigned*)job.to)[first + i] = value;
    }
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
