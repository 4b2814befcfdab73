// Sums over a warp and over a block, always in the same order: the same bits on every run.

#pragma once

#include <cstdint>

#include "target.cuh"

namespace zclip::cuda {

// Threads of every block. Tests may choose fewer, because sanitizers pay for each one.
#if defined(ZCLIP_BLOCK_THREADS)
constexpr int kThreads = ZCLIP_BLOCK_THREADS;
#else
constexpr int kThreads = 512;
#endif
constexpr int kWarpSize = 32;
constexpr int kWarps = kThreads / kWarpSize;
constexpr unsigned kAllLanes = 0xffffffffu;
static_assert(kThreads % kWarpSize == 0 && kWarps <= kWarpSize, "one warp adds up all warps");

// Returned to every lane. All lanes of the warp must call it.
template <typename sum_t>
__device__ __forceinline__ sum_t warp_sum(sum_t value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

// Returned to every thread. All threads of the block must call it.
__device__ __forceinline__ double block_sum(double value) {
  ZCLIP_SHARED(double, per_warp, kWarps);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  value = warp_sum(value);
  if (lane == 0) per_warp[warp] = value;
  __syncthreads();
  // Every warp adds up the same numbers in the same order, so none has to be told the result.
  value = warp_sum(lane < kWarps ? per_warp[lane] : 0.0);
  __syncthreads();  // before the next call writes per_warp again
  return value;
}

}  // namespace zclip::cuda
