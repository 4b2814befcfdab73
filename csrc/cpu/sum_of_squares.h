// The quick float32 sum of squares of one chunk, in the order that math/grad_stats.h lays down.
// The AVX2 and the portable version give the same bits: both multiply, round, then add. Each adds
// to kWide sums, so that a chunk may be taken in several runs of whole blocks.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../math/grad_stats.h"
#include "cpu_path.h"

#if ZCLIP_HAS_AVX2
#include <immintrin.h>
#endif

namespace zclip::cpu {

// Adds the kWide sums by halves.
inline double fold_wide(const double* wide) {
  const double a = wide[0] + wide[4], b = wide[1] + wide[5];
  const double c = wide[2] + wide[6], d = wide[3] + wide[7];
  return (a + c) + (b + d);
}

namespace portable {

template <Rescale kRescale, typename number_t>
void add_squares(const number_t* data, int64_t len, double (&wide)[kWide]) {
  for (int64_t start = 0; start < len; start += kBlock) {
    const int64_t block = std::min<int64_t>(kBlock, len - start);
    float lanes[kLanes] = {};
    for (int64_t row = 0; row < block; row += kLanes) {
      const number_t* x = data + start + row;
      const int64_t width = std::min<int64_t>(kLanes, block - row);
      for (int64_t lane = 0; lane < width; ++lane) {
        const float value = rescaled<kRescale>(widen(x[lane]));
        lanes[lane] += value * value;
      }
    }
    for (int half = kLanes / 2; half >= kWide; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    for (int lane = 0; lane < kWide; ++lane) wide[lane] += lanes[lane];
  }
}

template <Rescale>
void add_squares(const double* data, int64_t len, double (&wide)[kWide]) {
  int64_t i = 0;
  for (; i + kWide <= len; i += kWide) {
    for (int lane = 0; lane < kWide; ++lane) wide[lane] += data[i + lane] * data[i + lane];
  }
  for (int lane = 0; i < len; ++i, ++lane) wide[lane] += data[i] * data[i];
}

}  // namespace portable

#if ZCLIP_HAS_AVX2
namespace avx2 {

ZCLIP_AVX2 inline __m256 load(const float* x) { return _mm256_loadu_ps(x); }

ZCLIP_AVX2 inline __m256 load(const Bfloat16* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

ZCLIP_AVX2 inline __m256 load(const Float16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

template <Rescale kRescale>
ZCLIP_AVX2 inline __m256 rescaled(__m256 x) {
  if (kRescale == Rescale::kNone) return x;
  return _mm256_mul_ps(x, _mm256_set1_ps(zclip::rescaled<kRescale>(1.0f)));
}

// One row of kLanes elements, added lane by lane.
template <Rescale kRescale, typename number_t>
ZCLIP_AVX2 inline void add_row(const number_t* x, __m256 (&lanes)[kLanes / 8]) {
  for (int v = 0; v < kLanes / 8; ++v) {
    const __m256 value = rescaled<kRescale>(load(x + 8 * v));
    lanes[v] = _mm256_add_ps(lanes[v], _mm256_mul_ps(value, value));
  }
}

template <Rescale kRescale, typename number_t>
ZCLIP_AVX2 void add_squares(const number_t* data, int64_t len, double (&wide)[kWide]) {
  __m256d wide_low = _mm256_loadu_pd(wide), wide_high = _mm256_loadu_pd(wide + 4);
  for (int64_t start = 0; start < len; start += kBlock) {
    const int64_t block = std::min<int64_t>(kBlock, len - start);
    __m256 lanes[kLanes / 8];
    for (__m256& lane : lanes) lane = _mm256_setzero_ps();
    int64_t row = 0;
    for (; row + kLanes <= block; row += kLanes) {
      const number_t* x = data + start + row;
      for (int64_t byte = 0; byte < int64_t{kLanes * sizeof(number_t)}; byte += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(x) + byte + kPrefetchBytes, _MM_HINT_T0);
      }
      add_row<kRescale>(x, lanes);
    }
    if (row < block) {  // zeros change no sum, so the last row may be padded with them
      number_t padded[kLanes] = {};
      std::copy(data + start + row, data + start + block, padded);
      add_row<kRescale>(padded, lanes);
    }
    for (int half = kLanes / 16; half >= 1; half /= 2) {
      for (int v = 0; v < half; ++v) lanes[v] = _mm256_add_ps(lanes[v], lanes[v + half]);
    }
    wide_low = _mm256_add_pd(wide_low, _mm256_cvtps_pd(_mm256_castps256_ps128(lanes[0])));
    wide_high = _mm256_add_pd(wide_high, _mm256_cvtps_pd(_mm256_extractf128_ps(lanes[0], 1)));
  }
  _mm256_storeu_pd(wide, wide_low);
  _mm256_storeu_pd(wide + 4, wide_high);
}

template <Rescale>
ZCLIP_AVX2 void add_squares(const double* data, int64_t len, double (&wide)[kWide]) {
  __m256d low = _mm256_loadu_pd(wide), high = _mm256_loadu_pd(wide + 4);
  int64_t i = 0;
  for (; i + kWide <= len; i += kWide) {
    const __m256d a = _mm256_loadu_pd(data + i), b = _mm256_loadu_pd(data + i + 4);
    low = _mm256_add_pd(low, _mm256_mul_pd(a, a));
    high = _mm256_add_pd(high, _mm256_mul_pd(b, b));
  }
  _mm256_storeu_pd(wide, low);
  _mm256_storeu_pd(wide + 4, high);
  for (int lane = 0; i < len; ++i, ++lane) wide[lane] += data[i] * data[i];
}

}  // namespace avx2
#endif

}  // namespace zclip::cpu
