// Small kernels that test the emulator itself: each is right with Bug::kNone, and wrong in one
// known way with any other Bug it names. Also valid CUDA, which the tests check with nvcc.

#pragma once

#include "../../csrc/cuda/target.cuh"

#include <cstdint>

namespace samples {

enum class Bug {
  kNone,
  kMissingSyncthreads,   // block_sum: reads the partial sums before they are written
  kMissingReuseBarrier,  // block_sum twice: overwrites the array while others still read it
  kGlobalOffByOne,       // block_sum: reads one element past the end
  kSharedOffByOne,       // block_sum: writes one element past the shared array
  kSharedReadOffByOne,   // block_sum: reads one element past the shared array
  kDivergentShuffle,     // block_sum: a full-mask shuffle that only some lanes reach
  kDivergentBarrier,     // block_sum: a barrier that only the first warp reaches
  kReadTooEarly,         // hand_over: reads one barrier before the value is sure to be there
  kMissingSyncwarp,      // warp_rotate: reads a neighbour's value before it is written
  kShuffleForSyncwarp,   // warp_rotate: lanes meet in a shuffle, which orders no memory
  kMisalignedLoad,       // copy_vectors: a 16-byte load that does not begin on 16 bytes
  kMissingRelease,       // ticket_sum: no fence between the partial sum and the ticket
  kEarlyRelease,         // ticket_sum: the fence comes before the partial sum
  kMissingAcquire,       // ticket_sum: no fence between the ticket and the others' partial sums
  kMissingLastBarrier,   // ticket_sum: threads ask whether they are last before thread 0 knows
  kMissingTicketReset,   // ticket_sum: the second launch finds the ticket used up
  kPlainTicket,          // ticket_sum: the ticket is not atomic
};

constexpr int kThreads = 128;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ double warp_sum(double v) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    v += __shfl_down_sync(kAllLanes, v, offset);
  }
  return v;
}

// Sum over the block, returned to every thread, always in the same order.
template <Bug bug>
__device__ double block_sum(double v) {
  ZCLIP_SHARED(double, per_warp, kWarps);
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;

  v = warp_sum(v);
  if (lane == 0) per_warp[warp] = v;
  double* past = per_warp + kWarps;  // through a pointer: UBSan alone would see past an array
  if (bug == Bug::kSharedOffByOne && threadIdx.x == 0) *past = v;
  if (bug != Bug::kMissingSyncthreads) __syncthreads();
  if (bug == Bug::kDivergentShuffle) {
    if (threadIdx.x < kWarps) v = warp_sum(per_warp[lane]);
  } else if (warp == 0) {
    v = warp_sum(lane < kWarps ? per_warp[lane] : 0.0);
  }
  if (bug == Bug::kSharedReadOffByOne && threadIdx.x == 0 && *past == 1.0) v += 1.0;
  if (threadIdx.x == 0) per_warp[0] = v;
  if (bug == Bug::kDivergentBarrier) {
    if (warp == 0) __syncthreads();
  }
  __syncthreads();
  v = per_warp[0];
  if (bug != Bug::kMissingReuseBarrier) __syncthreads();
  return v;
}

// grid: one block per `length` elements. The last thread writes the block's sum and sum of
// squares: the one that would see a sum overwritten too early.
template <Bug bug>
__global__ void __launch_bounds__(kThreads)
    sums(const float* __restrict__ x, int64_t numel, int64_t length, double* __restrict__ out) {
  const int64_t begin = blockIdx.x * length;
  int64_t end = begin + length < numel ? begin + length : numel;
  if (bug == Bug::kGlobalOffByOne && end == numel) ++end;
  double sum = 0.0, squares = 0.0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double v = __ldg(x + i);
    sum += v;
    squares += v * v;
  }
  sum = block_sum<bug>(sum);
  squares = block_sum<bug>(squares);
  if (threadIdx.x == kThreads - 1) {
    out[2 * blockIdx.x] = sum;
    out[2 * blockIdx.x + 1] = squares;
  }
}

// grid: any. The first thread hands a number to the last one, between two barriers.
template <Bug bug>
__global__ void __launch_bounds__(kThreads) hand_over(const float* x, float* out) {
  ZCLIP_SHARED(float, number, 1);
  const bool is_taker = threadIdx.x == kThreads - 1;
  float taken = 0.0f;
  __syncthreads();
  if (threadIdx.x == 0) number[0] = x[blockIdx.x];
  if (bug == Bug::kReadTooEarly && is_taker) taken = number[0];
  __syncthreads();
  if (bug != Bug::kReadTooEarly && is_taker) taken = number[0];
  if (is_taker) out[blockIdx.x] = taken;
}

// grid: whole warps. Each lane passes its value to the lane before it, through shared memory.
template <Bug bug>
__global__ void __launch_bounds__(kThreads) warp_rotate(const float* x, float* out) {
  ZCLIP_SHARED(float, tile, kThreads);
  const int i = threadIdx.x;
  const int next = i / kWarp * kWarp + (i + 1) % kWarp;
  tile[i] = x[blockIdx.x * kThreads + i];
  if (bug == Bug::kShuffleForSyncwarp) {
    __shfl_sync(kAllLanes, 0, 0);
  } else if (bug != Bug::kMissingSyncwarp) {
    __syncwarp();
  }
  out[blockIdx.x * kThreads + i] = tile[next];
}

// grid: one thread per four elements, which it moves at once.
template <Bug bug>
__global__ void copy_vectors(const float* x, float* out, int64_t vectors) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (bug == Bug::kMisalignedLoad) ++x;
  if (i < vectors) reinterpret_cast<float4*>(out)[i] = reinterpret_cast<const float4*>(x)[i];
}

// grid: any. Sums x into *total; the block that draws the last ticket adds up the partial sums in
// order and leaves the ticket at 0 for the next launch.
template <Bug bug>
__global__ void __launch_bounds__(kThreads)
    ticket_sum(const float* x, int64_t numel, double* partials, unsigned* ticket, double* total) {
  ZCLIP_SHARED(bool, is_last, 1);
  double v = 0.0;
  for (int64_t i = blockIdx.x * kThreads + threadIdx.x; i < numel; i += gridDim.x * kThreads) {
    v += x[i];
  }
  v = block_sum<bug>(v);
  if (threadIdx.x == 0) {
    if (bug == Bug::kEarlyRelease) __threadfence();
    partials[blockIdx.x] = v;
    if (bug != Bug::kMissingRelease && bug != Bug::kEarlyRelease) __threadfence();
    const unsigned drawn = bug == Bug::kPlainTicket ? (*ticket)++ : atomicAdd(ticket, 1u);
    is_last[0] = drawn == gridDim.x - 1;
    if (bug != Bug::kMissingAcquire) __threadfence();
  }
  if (bug != Bug::kMissingLastBarrier) __syncthreads();
  if (!is_last[0]) return;

  v = 0.0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += kThreads) v += partials[b];
  v = block_sum<bug>(v);
  if (threadIdx.x == 0) {
    *total = v;
    if (bug != Bug::kMissingTicketReset) *ticket = 0;
  }
}

// As large an argument as a launch can carry, so that many pointers travel without a copy.
struct alignas(16) Table {
  static constexpr int kRows = 4080;
  const float* source;
  int64_t scale;
  double rows[kRows];
};
static_assert(sizeof(Table) > 32 * 1000 && sizeof(Table) <= 32764 - 16, "fits a launch");

// grid: one thread per row.
__global__ void scale_rows(const Table __grid_constant__ table, double* out, int rows) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows) out[i] = table.rows[i] * table.scale + *table.source;
}

}  // namespace samples
