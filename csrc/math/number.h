// The four number formats a gradient may have, and what their bits say. 16-bit formats are
// storage only: they widen to float exactly, and narrow once, to nearest, ties to even.

#pragma once

#include <cstdint>
#include <cstring>

#include "hd.h"

namespace zclip {

enum class Format : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kFloat64 = 3 };

ZCLIP_HD int64_t bytes_per_element(Format format) {
  return format == Format::kFloat32 ? 4 : format == Format::kFloat64 ? 8 : 2;
}

struct Bfloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

ZCLIP_HD uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ZCLIP_HD uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ZCLIP_HD float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

ZCLIP_HD double double_of(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Tested on bits, not with x != x: the answer must survive -ffast-math.
ZCLIP_HD bool is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }
ZCLIP_HD bool is_inf(float x) { return (bits_of(x) & 0x7fffffffu) == 0x7f800000u; }
ZCLIP_HD bool is_finite(float x) { return (bits_of(x) & 0x7fffffffu) < 0x7f800000u; }
ZCLIP_HD bool is_nan(double x) {
  return (bits_of(x) & 0x7fffffffffffffffull) > 0x7ff0000000000000ull;
}
ZCLIP_HD bool is_inf(double x) {
  return (bits_of(x) & 0x7fffffffffffffffull) == 0x7ff0000000000000ull;
}
ZCLIP_HD bool is_finite(double x) {
  return (bits_of(x) & 0x7fffffffffffffffull) < 0x7ff0000000000000ull;
}

ZCLIP_HD float widen(float x) { return x; }
ZCLIP_HD double widen(double x) { return x; }
ZCLIP_HD float widen(Bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

ZCLIP_HD float widen(Float16 x) {
#if defined(__CUDA_ARCH__)
  // One instruction instead of ten; both are exact.
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_of(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 5.9604644775390625e-08f;  // 2^-24
  return float_of(sign | bits_of(subnormal));
#endif
}

ZCLIP_HD void narrow(float x, float* to) { *to = x; }
ZCLIP_HD void narrow(double x, double* to) { *to = x; }

ZCLIP_HD void narrow(float x, Bfloat16* to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // Rounds alike, two numbers in one instruction; a NaN loses its payload.
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  // Rounding a NaN could carry it into infinity; keep its sign and make it quiet.
  const uint32_t quiet = bits | 0x00400000u;
  to->bits = static_cast<uint16_t>((is_nan(x) ? quiet : rounded) >> 16);
#endif
}

ZCLIP_HD void narrow(float x, Float16* to) {
#if defined(__CUDA_ARCH__)
  // Rounds alike; a NaN loses its payload.
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to->bits) : "f"(x));
#else
  const uint32_t bits = bits_of(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 65536 and above, infinity included
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // a normal float16; rounding may carry into infinity
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else {
    // Adding 0.5 puts the last bit of a float16 subnormal at the last bit of the float, so the
    // hardware rounds to nearest even for us.
    half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  }
  to->bits = static_cast<uint16_t>(sign | half);
#endif
}

}  // namespace zclip
