// The AVX2 forms of scale_one and clamp_one over a run of elements. Same bits as the portable
// loops.

#pragma once

#include "../math/scale.h"
#include "sum_of_squares.h"

namespace zclip::cpu {

#if ZCLIP_HAS_AVX2
namespace avx2 {

ZCLIP_AVX2 inline void store(float* to, __m256 x) { _mm256_storeu_ps(to, x); }

ZCLIP_AVX2 inline void store(Bfloat16* to, __m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  const __m256i packed = _mm256_packus_epi32(high, high);  // within each half of the register
  const __m128i low = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), low);
}

ZCLIP_AVX2 inline void store(Float16* to, __m256 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

template <typename number_t>
ZCLIP_AVX2 void scale(number_t* data, int64_t len, float coef) {
  const __m256 factor = _mm256_set1_ps(coef);
  int64_t i = 0;
  for (; i + 32 <= len; i += 32) {
    for (int v = 0; v < 4; ++v) {
      store(data + i + 8 * v, _mm256_mul_ps(load(data + i + 8 * v), factor));
    }
  }
  for (; i < len; ++i) scale_one(data[i], coef);
}

ZCLIP_AVX2 inline void scale(double* data, int64_t len, double coef) {
  const __m256d factor = _mm256_set1_pd(coef);
  int64_t i = 0;
  for (; i + 4 <= len; i += 4) {
    _mm256_storeu_pd(data + i, _mm256_mul_pd(_mm256_loadu_pd(data + i), factor));
  }
  for (; i < len; ++i) scale_one(data[i], coef);
}

// Most gradients are within their bounds: memory that needs no change is read and not written.
ZCLIP_AVX2 inline void clamp(float* data, int64_t len, float limit) {
  const __m256 high = _mm256_set1_ps(limit), low = _mm256_set1_ps(-limit);
  int64_t i = 0;
  for (; i + 32 <= len; i += 32) {
    __m256 x[4], beyond = _mm256_setzero_ps();
    for (int v = 0; v < 4; ++v) {
      x[v] = load(data + i + 8 * v);
      beyond = _mm256_or_ps(beyond, _mm256_or_ps(_mm256_cmp_ps(x[v], high, _CMP_GT_OQ),
                                                 _mm256_cmp_ps(x[v], low, _CMP_LT_OQ)));
    }
    if (_mm256_movemask_ps(beyond) == 0) continue;
    for (int v = 0; v < 4; ++v) {  // of two operands, these return the second if one is NaN
      store(data + i + 8 * v, _mm256_max_ps(low, _mm256_min_ps(high, x[v])));
    }
  }
  for (; i < len; ++i) clamp_one(data[i], limit);
}

}  // namespace avx2
#endif

template <typename number_t>
void scale_with_avx2(number_t* data, int64_t len, double coef) {
#if ZCLIP_HAS_AVX2
  avx2::scale(data, len, static_cast<decltype(widen(*data))>(coef));
#else
  (void)data, (void)len, (void)coef;
#endif
}

inline void clamp_with_avx2(float* data, int64_t len, float limit) {
#if ZCLIP_HAS_AVX2
  avx2::clamp(data, len, limit);
#else
  (void)data, (void)len, (void)limit;
#endif
}

}  // namespace zclip::cpu
