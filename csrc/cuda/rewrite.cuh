// Pass 2: what may be done to a gradient in place. A row that needs nothing is not even read.

#pragma once

#include "../math/scale.h"
#include "../math/totals.h"
#include "launch_grid.cuh"
#include "tensor_table.cuh"
#include "vectors.cuh"

namespace zclip::cuda {

// Applies change(number) to every element, kInFlight vectors at a time; all threads of the block.
template <typename number_t, typename Change>
__device__ __forceinline__ void rewrite_run(number_t* data, int len, Change&& change) {
  constexpr int kWidth = Vector<number_t>::kWidth;
  const Pieces<number_t> pieces = pieces_of(data, len);
  const int thread = static_cast<int>(threadIdx.x);
  int v = thread;
  for (; v + (kInFlight - 1) * kThreads < pieces.vectors; v += kRound) {
    uint4 vectors[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      vectors[k] = reinterpret_cast<const uint4*>(pieces.body)[v + k * kThreads];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      Vector<number_t> vector = vector_of<number_t>(vectors[k]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) change(vector.numbers[i]);
      store_vector(pieces.body, v + k * kThreads, vector);
    }
  }
  for (; v < pieces.vectors; v += kThreads) {
    Vector<number_t> vector = load_vector(pieces.body, v);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) change(vector.numbers[i]);
    store_vector(pieces.body, v, vector);
  }
  if (thread < pieces.head_len) change(pieces.head[thread]);
  if (thread < pieces.tail_len) change(pieces.tail[thread]);
}

// Writes zeros without reading: 0 * Inf would be NaN.
template <typename number_t>
__device__ __forceinline__ void zero_run(number_t* data, int len) {
  const Pieces<number_t> pieces = pieces_of(data, len);
  const int thread = static_cast<int>(threadIdx.x);
  for (int v = thread; v < pieces.vectors; v += kThreads) {
    store_vector(pieces.body, v, Vector<number_t>{});
  }
  if (thread < pieces.head_len) pieces.head[thread] = number_t{};
  if (thread < pieces.tail_len) pieces.tail[thread] = number_t{};
}

__device__ __forceinline__ bool is_bad(const GradStats& row) { return row.nan + row.inf > 0.0; }

// The three changes. Each says which rows it wants and what it does to a chunk of one of them.

// Zeros the bad elements of bad rows.
struct ZeroNonFinite {
  const GradStats* rows;

  __device__ bool wants(uint32_t row) const { return is_bad(rows[row]); }
  template <typename number_t>
  __device__ void apply(number_t* data, int len, uint32_t) const {
    rewrite_run(data, len, [](number_t& x) { zero_one_if_nonfinite(x); });
  }
};

// Multiplies by the row's coefficient; before that, if `zeroed` is given, does what ZeroNonFinite
// does, in the same reading.
struct Scale {
  const double* coefs;
  const GradStats* zeroed;  // or null

  __device__ bool wants(uint32_t row) const {
    return coefs[row] != kKeep || (zeroed != nullptr && is_bad(zeroed[row]));
  }
  template <typename number_t>
  __device__ void apply(number_t* data, int len, uint32_t row) const {
    const double coef = coefs[row];
    const bool drops = zeroed != nullptr && is_bad(zeroed[row]);
    const auto factor = static_cast<decltype(widen(number_t{}))>(coef);
    if (coef == kRefuse) {
      zero_run(data, len);
    } else if (fabs(coef) < kSmallestNormalFloat && coef != 0.0) {
      rewrite_run(data, len, [=](number_t& x) {
        if (drops) zero_one_if_nonfinite(x);
        scale_one_wide(x, coef);
      });
    } else if (drops) {  // rare, and a test that each element of all other runs would pay for
      rewrite_run(data, len, [=](number_t& x) {
        zero_one_if_nonfinite(x);
        scale_one(x, factor);
      });
    } else {
      rewrite_run(data, len, [=](number_t& x) { scale_one(x, factor); });
    }
  }
};

struct Clamp {
  double limit;

  __device__ bool wants(uint32_t) const { return true; }
  template <typename number_t>
  __device__ void apply(number_t* data, int len, uint32_t) const {
    using value_t = decltype(widen(number_t{}));
    number_t rounded;
    narrow(static_cast<value_t>(limit), &rounded);
    const value_t bound = widen(rounded);
    rewrite_run(data, len, [=](number_t& x) { clamp_one(x, bound); });
  }
};

// True in all threads if some row from `first` on is wanted: a look at the coefficients, some
// microseconds for thousands of them, saves looking up chunk after chunk of a healthy step.
template <typename Change>
__device__ __forceinline__ bool wants_any(const Change& change, uint32_t first, uint32_t end) {
  bool wanted = false;
  for (uint32_t row = first + threadIdx.x; row < end; row += kThreads) wanted |= change.wants(row);
  return __syncthreads_or(wanted);
}

// grid: any number of blocks; each takes every gridDim.x-th chunk, from the end, and writes its
// elements in place, if the change wants their row. Rows first_row to end_row are those of the
// table. Pass 1 has read the last chunks last: they are still in the cache.
template <typename Table, typename Change>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    rewrite(const Table __grid_constant__ table, const Change change, uint32_t first_row,
            uint32_t end_row) {
  if (!wants_any(change, first_row, end_row)) return;
  for (uint32_t before_end = blockIdx.x; before_end < table.chunks;) {
    const uint32_t c = table.chunks - 1 - before_end;
    const ChunkPlace place = place_of(table, c);
    if (change.wants(place.row)) {
      visit_chunk(place, [&](auto* data) { change.apply(data, place.len, place.row); });
      before_end += gridDim.x;
    } else {  // to this block's first chunk before the row
      before_end += (c - place.first_chunk + gridDim.x) / gridDim.x * gridDim.x;
    }
  }
}

}  // namespace zclip::cuda
