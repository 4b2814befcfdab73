// The stats of one chunk, measured by one block: quick first, exact where that fails.

#pragma once

#include "../math/grad_stats.h"
#include "vectors.cuh"

namespace zclip::cuda {

// What pass 1 leaves behind for each chunk: 16 bytes, so that one load brings it back.
struct alignas(16) ChunkSlot {
  double sumsq;
  uint32_t nan;
  uint32_t inf;
};

// Sums of squares of kInFlight vectors, or fewer. Each float32 result has passed through at most 7
// roundings: the square, kInFlight - 1 additions and 3 folds. That is 4.2e-7 for any data.
template <typename number_t, int kVectors>
__device__ __forceinline__ double squares_of(const Vector<number_t> (&vectors)[kVectors]) {
  constexpr int kWidth = Vector<number_t>::kWidth;
  decltype(widen(number_t{})) sums[kWidth] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      const auto value = widen(vectors[v].numbers[i]);
      sums[i] += value * value;
    }
  }
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// This thread's share of the quick sum.
template <typename number_t>
__device__ __forceinline__ double quick_share(const number_t* data, int len) {
  const Pieces<const number_t> pieces = pieces_of(data, len);
  const int thread = static_cast<int>(threadIdx.x);
  double sum = 0.0;
  int v = thread;
  for (; v + (kInFlight - 1) * kThreads < pieces.vectors; v += kInFlight * kThreads) {
    Vector<number_t> vectors[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      vectors[k] = load_vector(pieces.body, v + k * kThreads);
    }
    sum += squares_of(vectors);
  }
  for (; v < pieces.vectors; v += kThreads) {
    const Vector<number_t> vectors[1] = {load_vector(pieces.body, v)};
    sum += squares_of(vectors);
  }
  if (thread < pieces.head_len) {
    const auto value = widen(pieces.head[thread]);
    sum += value * value;
  }
  if (thread < pieces.tail_len) {
    const auto value = widen(pieces.tail[thread]);
    sum += value * value;
  }
  return sum;
}

// Returned to every thread. All threads of the block must call it with the same chunk.
template <typename number_t>
__device__ __forceinline__ ChunkSlot chunk_stats(const number_t* data, int len) {
  const double quick = block_sum(quick_share(data, len));
  if (trustworthy(quick)) return {quick, 0, 0};
  // Counts NaN and Inf, and sums the rest in float64. Rare, and the chunk is still in the cache.
  GradStats stats = {};
  for (int i = threadIdx.x; i < len; i += kThreads) observe(stats, data[i]);
  const double sumsq = block_sum(stats.sumsq);
  const double nan = block_sum(stats.nan), inf = block_sum(stats.inf);
  return {sumsq, static_cast<uint32_t>(nan), static_cast<uint32_t>(inf)};
}

}  // namespace zclip::cuda
