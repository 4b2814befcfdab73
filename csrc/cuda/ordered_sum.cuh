// Sums in the order of the index, as one thread alone would take them: the bits of the CPU. Only
// the additions are left to that thread; what is added, and the waiting for memory, is for all.

#pragma once

#include "../math/totals.h"
#include "block_join.cuh"

namespace zclip::cuda {

// value_of(0) + value_of(1) + ... Returned to thread 0. All threads of the block must call it; the
// thread i % kThreads makes value i.
template <typename ValueOf>
__device__ __forceinline__ double ordered_sum(int64_t count, ValueOf&& value_of) {
  ZCLIP_SHARED(double, staged, kThreads);
  const int64_t thread = threadIdx.x;
  double sum = 0.0, value = thread < count ? value_of(thread) : 0.0;
  for (int64_t first = 0; first < count; first += kThreads) {
    staged[thread] = value;
    __syncthreads();
    const int64_t next = first + kThreads + thread;
    if (next < count) value = value_of(next);  // on its way while thread 0 adds
    if (thread == 0) {
      const int64_t rest = count - first;
      const int in_stage = static_cast<int>(rest < kThreads ? rest : kThreads);
      for (int i = 0; i < in_stage; ++i) sum += staged[i];
    }
    __syncthreads();  // before thread 0's values are overwritten
  }
  return sum;
}

// As total_of. Returned to thread 0. All threads of the block must call it.
__device__ __forceinline__ Totals block_total(const GradStats* rows, int64_t count) {
  const double sumsq = ordered_sum(count, [&](int64_t i) { return rows[i].sumsq; });
  double nan = 0.0, inf = 0.0, largest = 0.0;
  int64_t bad = 0, worst = 0;  // rows from a row to the end; more of them, an earlier row
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    nan += rows[i].nan;
    inf += rows[i].inf;
    largest = Largest::join(largest, rows[i].sumsq);
    if (rows[i].nan + rows[i].inf > 0.0) bad = Largest::join(bad, count - i);
  }
  nan = block_sum(nan);  // whole numbers, in any order the same
  inf = block_sum(inf);
  bad = block_join<Largest>(bad);
  largest = block_join<Largest>(largest);
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    if (rows[i].sumsq == largest) worst = Largest::join(worst, count - i);
  }
  worst = bad > 0 ? bad : block_join<Largest>(worst);
  return {{sumsq, nan, inf}, worst > 0 ? count - worst : -1};
}

}  // namespace zclip::cuda
