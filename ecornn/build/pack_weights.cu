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
  int unused;
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

template <int kType>
__device__ void piece(const Work& work, const Job& job, const Source* sources, const unsigned long long* places,
                      const Parameters& parameters, int lane) {
  const bool small = job.kind == 1 || job.kind == 2;
  const int together = small ? 8 : 4;
  const long long first = (long long)work.piece * job.size;
  const unsigned long long* own = places + job.places;
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
