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

// Below this a chunk's quick sum may have lost squares to underflow: kChunk of them, flushed at
// 2^-126, amount to 2^-112, which is 2^-28 of 2^-84; and in float64 likewise.
template <typename value_t>
constexpr double kTinySum = 0x1p-84;
template <>
constexpr double kTinySum<double> = 0x1p-980;

// True if the quick sum of a chunk, taken in value_t, can be believed. Otherwise the chunk is read
// again: it holds a NaN, an Inf, numbers whose squares overflow, or only tiny ones and zeros.
template <typename value_t>
ZCLIP_HD bool trustworthy(double quick_sum) {
  return quick_sum >= kTinySum<value_t> && is_finite(quick_sum);
}

// An exact sum below this proves that the quick one, within 6.6e-7 of it or less, is below
// kTinySum.
constexpr double kSurelyTinySum = 0.999 * kTinySum<float>;

// What the second reading of a chunk multiplies its numbers by: a power of two, which rounds
// nothing and keeps the squares in the range of float32. So tiny and huge gradients are summed as
// quickly, and as exactly, as any others.
enum class Rescale {
  kNone,
  // No number is above 2^-42: squares are at most 2^108, and that of the smallest subnormal number,
  // 2^-149, is 2^-106. Nothing is lost, so that only zeros sum to 0.
  kTiny,
  // No number is above 2^128: sums of 64 squares, the longest in float32, stay below 2^122. The sum
  // of all was 2^128 or more and is 2^-12 or more, beside which 2^-112 is nothing.
  kHuge,
};

template <Rescale>
ZCLIP_HD double rescaled(double x) {
  return x;
}
template <Rescale kRescale>
ZCLIP_HD float rescaled(float x) {
  if (kRescale == Rescale::kTiny) return x * 0x1p96f;
  if (kRescale == Rescale::kHuge) return x * 0x1p-70f;
  return x;
}

// The sum of squares that a sum of rescaled squares stands for. Exact.
template <Rescale kRescale>
ZCLIP_HD double restored(double sum) {
  if (kRescale == Rescale::kTiny) return sum * 0x1p-192;
  if (kRescale == Rescale::kHuge) return sum * 0x1p140;
  return sum;
}

// The last resort, one element at a time, in float64. Bad elements are counted and left out, so
// that the norm of the healthy part stays readable.
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
