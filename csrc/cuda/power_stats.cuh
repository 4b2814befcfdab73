// power_stats: the norms other than the Euclidean one. In float64 throughout; few people need
// these, and none of them in a hurry.

#pragma once

#include "grad_stats.cuh"

namespace zclip::cuda {

// CUDA's pow() spills registers; this does not. Whole exponents, which nearly all norms have, by
// multiplication.
__device__ __forceinline__ double power(double size, double p) {
  constexpr double kMostProducts = 16.0;
  if (p > kMostProducts || p != floor(p)) return exp(p * log(size));
  double product = size;
  for (double i = 1.0; i < p; i += 1.0) product *= size;
  return product;
}

// Returned to every thread: the sum of |x|^p, or the largest |x| if p is infinite.
template <typename number_t>
__device__ __forceinline__ ChunkSlot chunk_powers(const number_t* data, int len, double p) {
  GradStats stats = {};
  for (int i = threadIdx.x; i < len; i += kThreads) {
    const auto value = widen(data[i]);
    stats.nan += is_nan(value) ? 1.0 : 0.0;
    stats.inf += is_inf(value) ? 1.0 : 0.0;
    const double size = is_finite(value) ? fabs(static_cast<double>(value)) : 0.0;
    if (is_inf(p)) {
      stats.sumsq = Largest::join(stats.sumsq, size);
    } else {
      stats.sumsq += power(size, p);
    }
  }
  const double joined = is_inf(p) ? block_join<Largest>(stats.sumsq) : block_sum(stats.sumsq);
  const double nan = block_sum(stats.nan), inf = block_sum(stats.inf);
  return {joined, static_cast<uint32_t>(nan), static_cast<uint32_t>(inf)};
}

// grid and order: as grad_stats_partials. The last block writes the rows.
template <typename Table>
__global__ void __launch_bounds__(kThreads)
    power_stats_partials(const Table __grid_constant__ table, ChunkSlot* slots, const Ticket ticket,
                         GradStats* rows, double p) {
  for (uint32_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
    const ChunkPlace place = place_of(table, c);
    const ChunkSlot slot =
        visit_chunk(place, [&](auto* data) { return chunk_powers(data, place.len, p); });
    if (threadIdx.x == 0) slots[c] = slot;
  }
  if (!is_last_block(ticket)) return;
  if (is_inf(p)) {
    for_each_tensor(table, FinishRow<Largest>{slots, rows});
  } else {
    for_each_tensor(table, FinishRow<Add>{slots, rows});
  }
}

}  // namespace zclip::cuda
