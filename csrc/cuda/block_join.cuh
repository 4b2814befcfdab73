// Sums and maxima over a warp and over a block, always in the same order: the same bits on every
// run.

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

struct Add {
  template <typename value_t>
  static __device__ __forceinline__ value_t join(value_t a, value_t b) {
    return a + b;
  }
};

struct Largest {
  template <typename value_t>
  static __device__ __forceinline__ value_t join(value_t a, value_t b) {
    return a < b ? b : a;
  }
};

// Returned to every lane. All lanes of the warp must call it.
template <typename Join, typename value_t>
__device__ __forceinline__ value_t warp_join(value_t value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = Join::join(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

// Returned to every thread. All threads of the block must call it. 0 must change nothing.
template <typename Join, typename value_t>
__device__ __forceinline__ value_t block_join(value_t value) {
  ZCLIP_SHARED(value_t, per_warp, kWarps);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  value = warp_join<Join>(value);
  if (lane == 0) per_warp[warp] = value;
  __syncthreads();
  // Every warp joins the same values in the same order, so none has to be told the result.
  value = warp_join<Join>(lane < kWarps ? per_warp[lane] : value_t{});
  __syncthreads();  // before the next call writes per_warp again
  return value;
}

__device__ __forceinline__ double block_sum(double value) { return block_join<Add>(value); }

// Threads that work on one thing together: a warp or the whole block. All of them must call join
// and any, whose result is returned to each.
struct WarpCrew {
  static constexpr int kSize = kWarpSize;
  static __device__ __forceinline__ int member() {
    return static_cast<int>(threadIdx.x) % kWarpSize;
  }
  template <typename Join, typename value_t>
  static __device__ __forceinline__ value_t join(value_t value) {
    return warp_join<Join>(value);
  }
  static __device__ __forceinline__ bool any(bool is) { return __any_sync(kAllLanes, is); }
};

struct BlockCrew {
  static constexpr int kSize = kThreads;
  static __device__ __forceinline__ int member() { return static_cast<int>(threadIdx.x); }
  template <typename Join, typename value_t>
  static __device__ __forceinline__ value_t join(value_t value) {
    return block_join<Join>(value);
  }
  static __device__ __forceinline__ bool any(bool is) { return __syncthreads_or(is); }
};

}  // namespace zclip::cuda
