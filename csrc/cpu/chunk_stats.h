// The stats of one run of elements, at most a chunk long: quick first, exact where that fails.

#pragma once

#include <algorithm>
#include <type_traits>

#include "../math/grad_stats.h"
#include "leading_zeros.h"
#include "sum_of_squares.h"

namespace zclip::cpu {

template <Rescale kRescale, typename number_t>
void add_squares(const number_t* data, int64_t len, bool avx2, double (&wide)[kWide]) {
#if ZCLIP_HAS_AVX2
  if (avx2) return avx2::add_squares<kRescale>(data, len, wide);
#else
  (void)avx2;
#endif
  portable::add_squares<kRescale>(data, len, wide);
}

template <Rescale kRescale, typename number_t>
double rescaled_sum(const number_t* data, int64_t len, bool avx2) {
  double wide[kWide] = {};
  add_squares<kRescale>(data, len, avx2, wide);
  return restored<kRescale>(fold_wide(wide));
}

// Each kind of gradient is read once, whatever its magnitude: the first block says what to try. The
// result does not depend on that guess.
template <typename number_t>
GradStats chunk_stats(const number_t* data, int64_t len, bool avx2) {
  using value_t = decltype(widen(*data));
  const int64_t zeros = leading_zeros(data, len, avx2);
  if (zeros == len) return {};
  const int64_t skipped = zeros / kBlock * kBlock;  // blocks of zeros change no sum
  const number_t* rest = data + skipped;
  const int64_t rest_len = len - skipped, first_len = std::min<int64_t>(kBlock, rest_len);
  double wide[kWide] = {};
  add_squares<Rescale::kNone>(rest, first_len, avx2, wide);
  const double first = fold_wide(wide);
  if constexpr (std::is_same_v<value_t, float>) {
    if (first < kTinySum<float>) {
      const double tiny = rescaled_sum<Rescale::kTiny>(rest, rest_len, avx2);
      if (tiny < kSurelyTinySum) return {tiny, 0.0, 0.0};
    }
  }
  if (is_finite(first)) {
    add_squares<Rescale::kNone>(rest + first_len, rest_len - first_len, avx2, wide);
  }
  const double quick = fold_wide(wide);
  if (trustworthy<value_t>(quick)) return {quick, 0.0, 0.0};
  if constexpr (std::is_same_v<value_t, float>) {
    if (quick < kTinySum<float>) {
      return {rescaled_sum<Rescale::kTiny>(rest, rest_len, avx2), 0.0, 0.0};
    }
    const double huge = rescaled_sum<Rescale::kHuge>(rest, rest_len, avx2);
    if (is_finite(huge)) return {huge, 0.0, 0.0};
  }
  GradStats stats = {};
  for (int64_t i = 0; i < len; ++i) observe(stats, data[i]);
  return stats;
}

}  // namespace zclip::cpu
