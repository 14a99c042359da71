// Copies weights that have changed to their places in packed buffers, see Placing in c_layer.h.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu_team.h"

namespace ecornn {

// A matrix to be packed: element (row, column) of `from`, contiguous, goes to to[row_at[row] + column_at[column]]. `run`
// is 8 where each 8 columns, from one that is a multiple of it on, go to places that follow each other, -8 where each 8
// rows do. Matrices of one packing follow each other and have the same tables. `kind` is one of PackKind.
struct PackJob {
  int64_t to, from, rows, columns, row_at, column_at, run, kind;
};

// What becomes of an element: it is copied, or widened to float32. c_layer.h has the same numbers.
enum PackKind : int64_t { kCopy32 = 0, kCopy16 = 1, kOfBfloat16 = 2, kOfFloat16 = 3 };

// Threads that have enough to do with these jobs.
inline int PackingThreads(const PackJob* jobs, int64_t count) {
  constexpr int64_t kLeast = 1 << 17;  // elements for each thread: some 50 us
  int64_t elements = 0;
  for (const PackJob* job = jobs; job != jobs + count; ++job) elements += job->rows * job->columns;
  return static_cast<int>(std::clamp<int64_t>(elements / kLeast, 1, 1024));
}

constexpr int64_t kPackRun = 8;

// Four columns of eight rows that are `stride` apart, each to eight places that follow each other.
inline void Turn(const float* from, int64_t stride, float* to, const int64_t* column_at) {
#if defined(__SSE2__)
  for (int half = 0; half < 2; ++half, from += 4 * stride, to += 4) {
    __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + stride);
    __m128 c = _mm_loadu_ps(from + 2 * stride), d = _mm_loadu_ps(from + 3 * stride);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(to + column_at[0], a);
    _mm_storeu_ps(to + column_at[1], b);
    _mm_storeu_ps(to + column_at[2], c);
    _mm_storeu_ps(to + column_at[3], d);
  }
#else
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < kPackRun; ++i) to[column_at[j] + i] = from[i * stride + j];
  }
#endif
}

inline float OfBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float OfBfloat16(uint16_t bits) { return OfBits(uint32_t{bits} << 16); }

inline float OfFloat16(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00) return OfBits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float size = OfBits(rest << 13) * 0x1p112f;  // its exponent counts from another number; exact, subnormals too
  return sign ? -size : size;
}

// Rows i0 to i1 and columns j0 to j1 of 16 bits.
template <typename To, typename Make>
void PackEach(const PackJob& job, int64_t i0, int64_t i1, int64_t j0, int64_t j1, Make make) {
  const auto* row_at = reinterpret_cast<const int64_t*>(job.row_at);
  const auto* column_at = reinterpret_cast<const int64_t*>(job.column_at);
  for (int64_t i = i0; i < i1; ++i) {
    const uint16_t* row = reinterpret_cast<const uint16_t*>(job.from) + i * job.columns;
    To* place = reinterpret_cast<To*>(job.to) + row_at[i];
    for (int64_t j = j0; j < j1; ++j) place[column_at[j]] = make(row[j]);
  }
}

// Rows i0 to i1 and columns j0 to j1.
inline void PackBlock(const PackJob& job, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  if (job.kind == kCopy16) return PackEach<uint16_t>(job, i0, i1, j0, j1, [](uint16_t bits) { return bits; });
  if (job.kind == kOfBfloat16) return PackEach<float>(job, i0, i1, j0, j1, OfBfloat16);
  if (job.kind == kOfFloat16) return PackEach<float>(job, i0, i1, j0, j1, OfFloat16);
  const auto* row_at = reinterpret_cast<const int64_t*>(job.row_at);
  const auto* column_at = reinterpret_cast<const int64_t*>(job.column_at);
  for (int64_t i = i0; i < i1; ++i) {
    const float* row = reinterpret_cast<const float*>(job.from) + i * job.columns;
    float* place = reinterpret_cast<float*>(job.to) + row_at[i];
    int64_t j = j0;
    if (job.run == -kPackRun && i + kPackRun <= i1) {
      for (; j + 4 <= j1; j += 4) Turn(row + j, job.columns, place, column_at + j);
      for (; j < j1; ++j) {
        for (int64_t n = 0; n < kPackRun; ++n) place[column_at[j] + n] = row[n * job.columns + j];
      }
      i += kPackRun - 1;
      continue;
    }
    if (job.run == kPackRun) {
      for (; j + kPackRun <= j1; j += kPackRun) std::memcpy(place + column_at[j], row + j, kPackRun * sizeof(float));
    }
    for (; j < j1; ++j) place[column_at[j]] = row[j];
  }
}

inline int PackWorker(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  constexpr int64_t kRows = 16, kColumns = 128;  // of a block: what its matrices share of lines stays in the cache
  const int64_t thread = args[0].v_int64, threads = args[1].v_int64, count = args[2].v_int64;
  const auto* jobs = static_cast<const PackJob*>(args[kScalars].v_ptr);
  int64_t number = 0;
  for (const PackJob *first = jobs, *last; first != jobs + count; first = last) {
    const auto apart = [first](const PackJob& job) {
      return job.row_at != first->row_at || job.rows != first->rows || job.columns != first->columns;
    };
    last = std::find_if(first, jobs + count, apart);
    for (int64_t i0 = 0; i0 < first->rows; i0 += kRows) {
      if (number++ % threads != thread) continue;
      const int64_t i1 = std::min(i0 + kRows, first->rows);
      for (int64_t j0 = 0; j0 < first->columns; j0 += kColumns) {
        const int64_t j1 = std::min(j0 + kColumns, first->columns);
        for (const PackJob* job = first; job != last; ++job) PackBlock(*job, i0, i1, j0, j1);
      }
    }
  }
  return 0;
}

}  // namespace ecornn
