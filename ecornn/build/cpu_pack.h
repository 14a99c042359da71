// Copies weights that have changed to their places in packed buffers, see runtime/repacking.py.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu_team.h"

namespace ecornn {

// A matrix to be packed: element (row, column) of `from`, contiguous, goes to to[row_at[row] + column_at[column]]. Each
// `run` columns, from one that is a multiple of it on, go to places that follow each other.
struct PackJob {
  int64_t to, from, rows, columns, row_at, column_at, run;
};

// Threads that have enough to do with these jobs.
inline int PackingThreads(const PackJob* jobs, int64_t count) {
  constexpr int64_t kLeast = 1 << 17;  // elements for each thread: some 50 us
  int64_t elements = 0;
  for (const PackJob* job = jobs; job != jobs + count; ++job) elements += job->rows * job->columns;
  return static_cast<int>(std::clamp<int64_t>(elements / kLeast, 1, 1024));
}

inline int PackWorker(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  constexpr int64_t kRows = 16, kColumns = 256;  // of a block, whose places stay in the cache
  constexpr int64_t kRun = 8;
  const int64_t thread = args[0].v_int64, threads = args[1].v_int64, count = args[2].v_int64;
  const auto* jobs = static_cast<const PackJob*>(args[kScalars].v_ptr);
  int64_t number = 0;
  for (const PackJob* job = jobs; job != jobs + count; ++job) {
    auto* to = reinterpret_cast<float*>(job->to);
    const auto* from = reinterpret_cast<const float*>(job->from);
    const auto* row_at = reinterpret_cast<const int64_t*>(job->row_at);
    const auto* column_at = reinterpret_cast<const int64_t*>(job->column_at);
    for (int64_t i0 = 0; i0 < job->rows; i0 += kRows) {
      if (number++ % threads != thread) continue;
      const int64_t i1 = i0 + kRows < job->rows ? i0 + kRows : job->rows;
      for (int64_t j0 = 0; j0 < job->columns; j0 += kColumns) {
        const int64_t j1 = j0 + kColumns < job->columns ? j0 + kColumns : job->columns;
        for (int64_t i = i0; i < i1; ++i) {
          const float* row = from + i * job->columns;
          float* place = to + row_at[i];
          if (job->run == kRun) {
            int64_t j = j0;
            for (; j + kRun <= j1; j += kRun) std::memcpy(place + column_at[j], row + j, kRun * sizeof(float));
            for (; j < j1; ++j) place[column_at[j]] = row[j];
          } else {
            for (int64_t j = j0; j < j1; ++j) place[column_at[j]] = row[j];
          }
        }
      }
    }
  }
  return 0;
}

}  // namespace ecornn
