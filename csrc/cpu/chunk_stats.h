// The stats of one run of elements, at most a chunk long: quick first, exact where that fails.

#pragma once

#include "../math/grad_stats.h"
#include "sum_of_squares.h"

namespace zclip::cpu {

template <typename number_t>
bool all_zero(const number_t* data, int64_t len) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(data);
  unsigned char any = 0;
  for (int64_t i = 0; i < len * int64_t{sizeof(number_t)}; ++i) any |= bytes[i];
  return any == 0;
}

template <typename number_t>
GradStats chunk_stats(const number_t* data, int64_t len, bool avx2) {
#if ZCLIP_HAS_AVX2
  const double quick = avx2 ? avx2::sum_of_squares(data, len) : portable::sum_of_squares(data, len);
#else
  (void)avx2;
  const double quick = portable::sum_of_squares(data, len);
#endif
  if (trustworthy(quick)) return {quick, 0.0, 0.0};
  GradStats stats = {};
  if (quick == 0.0 && all_zero(data, len)) return stats;
  for (int64_t i = 0; i < len; ++i) observe(stats, data[i]);
  return stats;
}

}  // namespace zclip::cpu
