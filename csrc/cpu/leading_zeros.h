// How many zeros, of either sign, a run of elements begins with. Rows of an embedding that no token
// of the batch used are nothing else, nor are gradients of idle experts.

#pragma once

#include <cstdint>
#include <cstring>

#include "../math/number.h"
#include "cpu_path.h"

#if ZCLIP_HAS_AVX2
#include <immintrin.h>
#endif

namespace zclip::cpu {

constexpr int64_t kZeroLine = 64;  // bytes looked at together

// Every bit of a word of numbers but their signs.
constexpr uint64_t magnitude_bits(const float*) { return 0x7fffffff7fffffffull; }
constexpr uint64_t magnitude_bits(const double*) { return 0x7fffffffffffffffull; }
constexpr uint64_t magnitude_bits(const Bfloat16*) { return 0x7fff7fff7fff7fffull; }
constexpr uint64_t magnitude_bits(const Float16*) { return 0x7fff7fff7fff7fffull; }

namespace portable {

inline int64_t zero_lines(const char* data, int64_t lines, uint64_t magnitude) {
  int64_t line = 0;
  for (; line < lines; ++line) {
    uint64_t words[kZeroLine / sizeof(uint64_t)], any = 0;
    std::memcpy(words, data + line * kZeroLine, sizeof words);
    for (const uint64_t word : words) any |= word;
    if ((any & magnitude) != 0) break;
  }
  return line;
}

}  // namespace portable

#if ZCLIP_HAS_AVX2
namespace avx2 {

ZCLIP_AVX2 inline int64_t zero_lines(const char* data, int64_t lines, uint64_t magnitude) {
  const __m256i mask = _mm256_set1_epi64x(static_cast<long long>(magnitude));
  int64_t line = 0;
  for (; line < lines; ++line) {
    const auto* half = reinterpret_cast<const __m256i*>(data + line * kZeroLine);
    _mm_prefetch(reinterpret_cast<const char*>(half) + kPrefetchBytes, _MM_HINT_T0);
    const __m256i any = _mm256_or_si256(_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1));
    if (!_mm256_testz_si256(any, mask)) break;
  }
  return line;
}

}  // namespace avx2
#endif

// At most as many as there are; `len` only if all of them are zeros.
template <typename number_t>
int64_t leading_zeros(const number_t* data, int64_t len, bool avx2) {
  constexpr int64_t kPerLine = kZeroLine / int64_t{sizeof(number_t)};
  constexpr uint64_t kMagnitude = magnitude_bits(static_cast<const number_t*>(nullptr));
  const auto* bytes = reinterpret_cast<const char*>(data);
  const int64_t lines = len / kPerLine;
#if ZCLIP_HAS_AVX2
  const int64_t zeros = kPerLine * (avx2 ? avx2::zero_lines(bytes, lines, kMagnitude)
                                         : portable::zero_lines(bytes, lines, kMagnitude));
#else
  (void)avx2;
  const int64_t zeros = kPerLine * portable::zero_lines(bytes, lines, kMagnitude);
#endif
  if (zeros < lines * kPerLine) return zeros;
  char rest[kZeroLine] = {};
  std::memcpy(rest, data + zeros, (len - zeros) * sizeof(number_t));
  return portable::zero_lines(rest, 1, kMagnitude) == 1 ? len : zeros;
}

}  // namespace zclip::cpu
