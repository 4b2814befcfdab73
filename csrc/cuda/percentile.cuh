// The percentile of AutoClip with a whole block counting: one thread alone would need tens of
// thousands of steps. Selection rounds nothing, so the bits are those of math/auto_clip.h.

#pragma once

#include "../math/auto_clip.h"
#include "block_join.cuh"

namespace zclip::cuda {

// As value_of_rank. All threads of the block must call it and get the same answer.
__device__ __forceinline__ double block_value_of_rank(const double* values, int64_t count,
                                                      int64_t rank) {
  uint64_t answer = 0;
  for (int bit = kHighestBit; bit >= 0; --bit) {
    const uint64_t candidate = answer | uint64_t{1} << bit;
    double bound;
    memcpy(&bound, &candidate, sizeof bound);
    if (is_nan(bound)) continue;  // beyond infinity
    int64_t below = 0;
    for (int64_t first = 0; first < count; first += kThreads) {
      const int64_t i = first + threadIdx.x;
      below += __syncthreads_count(i < count && values[i] < bound);
    }
    if (below <= rank) answer = candidate;
  }
  double value;
  memcpy(&value, &answer, sizeof value);
  return value;
}

// As percentile_of.
__device__ __forceinline__ double block_percentile(const double* values, int64_t count,
                                                   double percentile) {
  if (count == 0) return 0.0;
  bool has_nan = false;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) has_nan |= is_nan(values[i]);
  if (__syncthreads_or(has_nan)) return static_cast<double>(NAN);
  const double rank = percentile / 100.0 * static_cast<double>(count - 1);
  const auto low = static_cast<int64_t>(rank);
  const double below = block_value_of_rank(values, count, low);
  if (low + 1 >= count) return below;
  const double above = block_value_of_rank(values, count, low + 1);
  // Equal neighbours first: between two infinities there is nothing to interpolate.
  if (above == below) return below;
  return below + (rank - static_cast<double>(low)) * (above - below);
}

}  // namespace zclip::cuda
