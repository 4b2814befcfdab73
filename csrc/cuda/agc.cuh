// agc_: the slots of all rows, of gradients and of weights, become coefficients of rows; then one
// block writes the report. Pass 2 scales after it.

#pragma once

#include "../math/agc.h"
#include "apply_rule.cuh"
#include "grad_stats.cuh"

namespace zclip::cuda {

struct AgcSettings {
  double clip;
  double eps;
  OnNonFinite on_nonfinite;
};

// On the device, what agc_ knows about each tensor and each row.
struct AgcResults {
  GradStats* stats;   // of each gradient
  double* least;      // coefficient of each gradient's rows
  double* clipped;    // squared norm left over, of each gradient
  double* row_coefs;  // of each row of the list
};

struct AgcTensor {
  uint32_t first_row;
  uint32_t rows;
  uint32_t first_slot;
  uint32_t slots_per_row;
};

struct LesserCoef {
  static __device__ __forceinline__ double join(double a, double b) { return lesser_coef(a, b); }
};

constexpr int kAgcCapacity = 200;

struct AgcTable {
  int32_t count;
  int32_t first_tensor;
  AgcTensor tensors[kAgcCapacity];
};
static_assert(sizeof(AgcTable) + kOtherArguments <= 4096, "fits any launch");

// A row of at most so many elements is measured by a warp: to a block it is a load or two per
// thread, between barriers that take longer.
constexpr int kLongestOfWarp = 8192;

// grid: any number of blocks; each takes every gridDim.x-th group of kWarps chunks, a warp for each
// short one, then the whole block for each long one. The crew's first thread writes slots[chunk].
template <typename Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    row_stats_partials(const Table __grid_constant__ table, ChunkSlot* slots) {
  ZCLIP_SHARED(bool, is_long, kWarps);
  const uint32_t warp = threadIdx.x / kWarpSize;
  ChunkWalk<Table> walk(table);
  for (uint32_t first = blockIdx.x * kWarps; first < table.chunks; first += gridDim.x * kWarps) {
    const ChunkPlace place = walk.place_of(first + warp);
    if (WarpCrew::member() == 0) is_long[warp] = place.len > kLongestOfWarp;
    if (place.len > 0 && place.len <= kLongestOfWarp) {
      const ChunkSlot slot =
          visit_chunk(place, [&](auto* data) { return chunk_stats<WarpCrew>(data, place.len); });
      if (WarpCrew::member() == 0) slots[first + warp] = slot;
    }
    __syncthreads();
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (!is_long[w]) continue;
      const ChunkPlace whole = place_of(table, first + w);
      const ChunkSlot slot =
          visit_chunk(whole, [&](auto* data) { return chunk_stats<BlockCrew>(data, whole.len); });
      if (threadIdx.x == 0) slots[first + w] = slot;
    }
    __syncthreads();  // before the next group is called long or short
  }
}

__device__ __forceinline__ GradStats row_stats(const ChunkSlot* slots, uint32_t count) {
  GradStats sum = {};
  for (uint32_t c = 0; c < count; ++c) {
    merge(sum,
          {slots[c].sumsq, static_cast<double>(slots[c].nan), static_cast<double>(slots[c].inf)});
  }
  return sum;
}

// grid: any number of blocks; each takes every gridDim.x-th tensor, and each thread every
// kThreads-th row of it. Threads write row_coefs; thread 0 the tensor's other results, summed in a
// fixed order.
__global__ void __launch_bounds__(kThreads)
    agc_rows(const AgcTable __grid_constant__ table, const ChunkSlot* grad_slots,
             const ChunkSlot* weight_slots, const AgcSettings settings, const AgcResults out) {
  ZCLIP_SHARED(double, warp_least, kWarps);
  for (int t = blockIdx.x; t < table.count; t += gridDim.x) {
    const AgcTensor& tensor = table.tensors[t];
    GradStats sum = {};
    double least = kKeep, clipped = 0.0;
    for (uint32_t r = threadIdx.x; r < tensor.rows; r += kThreads) {
      const uint32_t slot = tensor.first_slot + r * tensor.slots_per_row;
      const GradStats grad = row_stats(grad_slots + slot, tensor.slots_per_row);
      // The weights' NaN and Inf do not count: this rule judges gradients.
      const double weight_sumsq = row_stats(weight_slots + slot, tensor.slots_per_row).sumsq;
      const double norm = norm_of(grad);
      const double coef = agc_row(norm, sqrt(weight_sumsq), settings.clip, settings.eps);
      out.row_coefs[tensor.first_row + r] = coef;
      least = lesser_coef(coef, least);
      clipped += norm * coef * (norm * coef);
      merge(sum, grad);
    }
    sum = {block_sum(sum.sumsq), block_sum(sum.nan), block_sum(sum.inf)};
    clipped = block_sum(clipped);
    least = warp_join<LesserCoef>(least);
    // Those of the tensor before have been read, since the sums have barriers.
    if (threadIdx.x % kWarpSize == 0) warp_least[threadIdx.x / kWarpSize] = least;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int other = 1; other < kWarps; ++other) least = lesser_coef(warp_least[other], least);
      out.stats[table.first_tensor + t] = sum;
      out.least[table.first_tensor + t] = least;
      out.clipped[table.first_tensor + t] = clipped;
    }
  }
}

// grid: one block. Writes coefs, verdict, norm and state; on a refused step also all row_coefs.
__global__ void __launch_bounds__(kThreads)
    agc_finish(const AgcResults results, int64_t count, int64_t rows, const AgcSettings settings,
               double* counters, const Judgement out) {
  ZCLIP_SHARED(bool, refuse, 1);
  bool clips = false;
  const Totals total = block_total(results.stats, count);
  const double clipped_sumsq = ordered_sum(count, [&](int64_t t) {
    clips |= !(results.least[t] >= 1.0);
    return results.clipped[t];
  });
  const bool any_clipped = __syncthreads_or(clips);
  if (threadIdx.x == 0) {
    const Health health = health_of(total);
    refuse[0] = refused(health, settings.on_nonfinite);
    Report report = {};
    report.blocked = refuse[0];
    report.clipped = any_clipped && !refuse[0];
    report.clipped_norm = refuse[0] ? 0.0 : sqrt(clipped_sumsq);
    write_report(health, report, counters, out.verdict);
    write_norm(out, health.norm);
  }
  __syncthreads();
  for (int64_t t = threadIdx.x; t < count; t += kThreads) {
    out.coefs[t] = refuse[0] ? kRefuse : results.least[t];
  }
  if (!refuse[0]) return;
  for (int64_t r = threadIdx.x; r < rows; r += kThreads) results.row_coefs[r] = kRefuse;
}

}  // namespace zclip::cuda
