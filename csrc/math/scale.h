// One element of scale_, zero_nonfinite_ and clamp_.

#pragma once

#include "number.h"
#include "verdict.h"

namespace zclip {

// Products of 16-bit numbers are taken in float32 and rounded once.
ZCLIP_HD void scale_one(float& x, float coef) { x = x * coef; }
ZCLIP_HD void scale_one(double& x, double coef) { x = x * coef; }
ZCLIP_HD void scale_one(Bfloat16& x, float coef) { narrow(widen(x) * coef, &x); }
ZCLIP_HD void scale_one(Float16& x, float coef) { narrow(widen(x) * coef, &x); }

// For coefficients that float32 would hold badly, because the norm overflowed it.
constexpr double kSmallestNormalFloat = 1.1754943508222875e-38;

template <typename number_t>
ZCLIP_HD void scale_one_wide(number_t& x, double coef) {
  narrow(static_cast<float>(static_cast<double>(widen(x)) * coef), &x);
}
ZCLIP_HD void scale_one_wide(double& x, double coef) { x = x * coef; }

template <typename number_t>
ZCLIP_HD void zero_one_if_nonfinite(number_t& x) {
  if (!is_finite(widen(x))) x = number_t{};
}

// As torch.clamp: a NaN stays a NaN. The limit has been rounded to the tensor's own format.
template <typename number_t, typename value_t>
ZCLIP_HD void clamp_one(number_t& x, value_t limit) {
  const value_t value = widen(x);
  const value_t below = value > limit ? limit : value;
  narrow(below < -limit ? -limit : below, &x);
}

}  // namespace zclip
