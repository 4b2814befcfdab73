// The stats of one chunk, measured by a crew: quick first, exact where that fails.

#pragma once

#include <type_traits>

#include "../math/grad_stats.h"
#include "vectors.cuh"

namespace zclip::cuda {

// What pass 1 leaves behind for each chunk: 16 bytes, so that one load brings it back.
struct alignas(16) ChunkSlot {
  double sumsq;
  uint32_t nan;
  uint32_t inf;
};

// Adds the squares of a vector's numbers to the sums, or begins these.
template <typename number_t, Rescale kRescale, bool kBegins>
__device__ __forceinline__ void add_vector(
    const uint4& bits, decltype(widen(number_t{})) (&sums)[kWidthOf<number_t>]) {
#pragma unroll
  for (int i = 0; i < kWidthOf<number_t>; ++i) {
    const auto value = rescaled<kRescale>(widened<number_t>(bits, i));
    sums[i] = kBegins ? value * value : sums[i] + value * value;
  }
}

template <typename value_t, int kWidth>
__device__ __forceinline__ double folded(value_t (&sums)[kWidth]) {
#pragma unroll
  for (int half = kWidth / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

// Adds a whole round. Each float32 sum has then passed through at most 7 roundings: the square,
// kInFlight - 1 additions and 3 folds. That is 4.2e-7 for any data. Each vector that was used makes
// room for one of the next round, `ahead`, of which `left` are there counted from this thread's
// first: so kInFlight loads are always under way, with one round in registers.
template <typename number_t, bool kAheadIsWhole>
__device__ __forceinline__ double whole_round(Round& round, const uint4* ahead, int left) {
  decltype(widen(number_t{})) sums[kWidthOf<number_t>];
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    if (k == 0) {
      add_vector<number_t, Rescale::kNone, true>(round.vectors[k], sums);
    } else {
      add_vector<number_t, Rescale::kNone, false>(round.vectors[k], sums);
    }
    if (kAheadIsWhole || left > k * kThreads) {
      round.vectors[k] = ahead[k * kThreads];
    }
  }
  return folded(sums);
}

// What stands before and behind the vectors.
template <typename Crew, Rescale kRescale, typename number_t>
__device__ __forceinline__ void add_ends(const Pieces<const number_t>& pieces, double& sum) {
  if (Crew::member() < pieces.head_len) {
    const auto value = rescaled<kRescale>(widen(pieces.head[Crew::member()]));
    sum += value * value;
  }
  if (Crew::member() < pieces.tail_len) {
    const auto value = rescaled<kRescale>(widen(pieces.tail[Crew::member()]));
    sum += value * value;
  }
}

// This thread's share of the sum of squares. `round` is the chunk's first one, which has been on
// its way since before the last chunk was added up; it leaves as the first one of `next`.
template <typename number_t>
__device__ __forceinline__ double squares_share(const number_t* data, int len, Round& round,
                                                const Run& next) {
  constexpr int kToLast = (kInFlight - 1) * kThreads;  // from a round's first vector
  const Pieces<const number_t> pieces = pieces_of(data, len);
  const int thread = static_cast<int>(threadIdx.x);
  const uint4* at = reinterpret_cast<const uint4*>(pieces.body) + thread;
  int left = pieces.vectors - thread;
  double sum = 0.0;
  for (; left > kRound + kToLast; left -= kRound, at += kRound) {
    sum += whole_round<number_t, true>(round, at + kRound, 0);
  }
  do {  // at most two rounds
    const bool stays = left > kRound;
    const uint4* ahead = in_global_memory(stays ? at + kRound : next.vectors + thread);
    const int ahead_left = stays ? left - kRound : next.count - thread;
    if (left > kToLast) {
      sum += whole_round<number_t, false>(round, ahead, ahead_left);
    } else {  // the last vectors, one by one
#pragma unroll
      for (int k = 0; k < kInFlight - 1; ++k) {
        if (left <= k * kThreads) break;
        decltype(widen(number_t{})) sums[kWidthOf<number_t>];
        add_vector<number_t, Rescale::kNone, true>(round.vectors[k], sums);
        sum += folded(sums);
      }
      round = load_round({ahead - thread, ahead_left + thread}, thread);
    }
    left -= kRound;
  } while (left > 0);
  add_ends<BlockCrew, Rescale::kNone>(pieces, sum);
  return sum;
}

template <typename number_t>
__device__ __forceinline__ Run run_of(const Pieces<const number_t>& pieces) {
  return {reinterpret_cast<const uint4*>(pieces.body), pieces.vectors};
}

// Whether the chunk is nothing but zeros, of either sign.
template <typename Crew, typename number_t>
__device__ __forceinline__ bool is_all_zero(const number_t* data, int len) {
  const Pieces<const number_t> pieces = pieces_of(data, len);
  uint4 any = {};
  for (int v = Crew::member(); v < pieces.vectors; v += kInFlight * Crew::kSize) {
    const Round round = load_round<Crew::kSize>(run_of(pieces), v);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const uint4& bits = round.vectors[k];
      any = {any.x | bits.x, any.y | bits.y, any.z | bits.z, any.w | bits.w};
    }
  }
  bool found = false;
#pragma unroll
  for (int i = 0; i < kWidthOf<number_t>; ++i) found |= widened<number_t>(any, i) != 0;
  if (Crew::member() < pieces.head_len) found |= widen(pieces.head[Crew::member()]) != 0;
  if (Crew::member() < pieces.tail_len) found |= widen(pieces.tail[Crew::member()]) != 0;
  return !Crew::any(found);
}

// The sum of squares, with nothing loaded ahead.
template <typename Crew, Rescale kRescale, typename number_t>
__device__ __forceinline__ double sum_of_squares(const number_t* data, int len) {
  const Pieces<const number_t> pieces = pieces_of(data, len);
  double sum = 0.0;
  for (int v = Crew::member(); v < pieces.vectors; v += kInFlight * Crew::kSize) {
    const Round round = load_round<Crew::kSize>(run_of(pieces), v);
    decltype(widen(number_t{})) sums[kWidthOf<number_t>];
    add_vector<number_t, kRescale, true>(round.vectors[0], sums);
#pragma unroll
    for (int k = 1; k < kInFlight; ++k) {
      add_vector<number_t, kRescale, false>(round.vectors[k], sums);
    }
    sum += folded(sums);
  }
  add_ends<Crew, kRescale>(pieces, sum);
  return restored<kRescale>(Crew::template join<Add>(sum));
}

// Counts NaN and Inf, and sums the rest in float64, one element at a time.
template <typename Crew, typename number_t>
__device__ __forceinline__ ChunkSlot observed(const number_t* data, int len) {
  GradStats stats = {};
  for (int i = Crew::member(); i < len; i += Crew::kSize) observe(stats, data[i]);
  const double sumsq = Crew::template join<Add>(stats.sumsq);
  const double nan = Crew::template join<Add>(stats.nan);
  const double inf = Crew::template join<Add>(stats.inf);
  return {sumsq, static_cast<uint32_t>(nan), static_cast<uint32_t>(inf)};
}

// The second reading of a chunk whose quick sum cannot be believed. It is still in the cache.
template <typename Crew, typename number_t>
__device__ __forceinline__ ChunkSlot second_reading(const number_t* data, int len, double quick) {
  if constexpr (!std::is_same_v<number_t, double>) {
    if (quick == 0.0 && is_all_zero<Crew>(data, len)) return {};
    if (quick < kTinySum<float>) return {sum_of_squares<Crew, Rescale::kTiny>(data, len), 0, 0};
    const double huge = sum_of_squares<Crew, Rescale::kHuge>(data, len);
    if (is_finite(huge)) return {huge, 0, 0};
  }
  return observed<Crew>(data, len);
}

// Returned to every thread of the crew, all of which must call it with the same chunk.
template <typename Crew, typename number_t>
__device__ __forceinline__ ChunkSlot chunk_stats(const number_t* data, int len) {
  const double quick = sum_of_squares<Crew, Rescale::kNone>(data, len);
  if (trustworthy<decltype(widen(number_t{}))>(quick)) return {quick, 0, 0};
  return second_reading<Crew>(data, len, quick);
}

// The same by the block, with loads under way from one chunk to the next: `round` and `next` as in
// squares_share.
template <typename number_t>
__device__ __forceinline__ ChunkSlot streamed_stats(const number_t* data, int len, Round& round,
                                                    const Run& next) {
  const double quick = block_sum(squares_share(data, len, round, next));
  if (trustworthy<decltype(widen(number_t{}))>(quick)) return {quick, 0, 0};
  const ChunkSlot slot = second_reading<BlockCrew>(data, len, quick);
  // Again, because registers that held it until here would be missing in the loop above.
  round = load_round(next, static_cast<int>(threadIdx.x));
  return slot;
}

}  // namespace zclip::cuda
