// What one pass over a gradient learns about it. No threads, no tensors, no allocation: the CPU
// loop, the CUDA kernel and the SIMT tests call these same functions, and zclip/reference
// says the same thing in torch.

#pragma once

#include <cstdint>

#include "number.h"

namespace zclip {

// Columns of the float64 [num_tensors, kNumStats] tensor that every backend fills.
enum StatColumn : int { kSumSq = 0, kNan = 1, kInf = 2, kNumStats = 3 };

// One row of it, bit for bit. Counts are doubles so that one SUM all-reduce carries the row.
struct GradStats {
  double sumsq;  // of the finite elements
  double nan;
  double inf;
};

// A gradient is measured in chunks of this many elements, whatever the device, the number of
// threads or of multiprocessors: the same bits come out everywhere.
constexpr int64_t kChunk = 16384;

// Inside a chunk float32 sums are at most kBlock elements long, in kLanes independent sums of
// kBlock / kLanes terms, folded by halves to kWide sums that go on in float64. Each float32 result
// has passed through at most 8 + 3 roundings, so a sum of squares is within 11 * 2^-24 = 6.6e-7
// of the exact one for *any* data, not only for kind data.
constexpr int kBlock = 512;
constexpr int kLanes = 64;
constexpr int kWide = 8;

// Below this a chunk's float32 sum may have lost squares to underflow: kChunk of them, flushed at
// 2^-126, amount to 2^-112, which is 2^-28 of 2^-84.
constexpr double kTinySum = 5.169878828456423e-26;  // 2^-84

// True if the quick float32 sum of a chunk can be believed. Otherwise the chunk is read again:
// it holds a NaN, an Inf, numbers whose squares overflow float32, or only tiny ones and zeros.
ZCLIP_HD bool trustworthy(double quick_sum) {
  return quick_sum >= kTinySum && is_finite(quick_sum);
}

// The second reading, one element at a time. Bad elements are counted and left out, so that the
// norm of the healthy part stays readable.
template <typename number_t>
ZCLIP_HD void observe(GradStats& stats, number_t x) {
  const auto value = widen(x);
  stats.nan += is_nan(value) ? 1.0 : 0.0;
  stats.inf += is_inf(value) ? 1.0 : 0.0;
  const double wide = is_finite(value) ? static_cast<double>(value) : 0.0;
  stats.sumsq += wide * wide;
}

ZCLIP_HD void merge(GradStats& into, const GradStats& from) {
  into.sumsq += from.sumsq;
  into.nan += from.nan;
  into.inf += from.inf;
}

}  // namespace zclip
