// AGC (arXiv 2102.06171): bound the gradient of each output unit by the size of its weights.

#pragma once

#include "report.h"

namespace zclip {

constexpr double kSmallestGradNorm = 1e-6;  // timm divides by no less

// The factor for one row. A NaN norm gives a NaN factor, as in timm.
ZCLIP_HD double agc_row(double grad_norm, double weight_norm, double clip, double eps) {
  const double limit = clip * (weight_norm < eps ? eps : weight_norm);
  if (grad_norm <= limit) return kKeep;
  return limit / (grad_norm < kSmallestGradNorm ? kSmallestGradNorm : grad_norm);
}

// The lesser of two coefficients; a NaN is the least of all, so that it is seen.
ZCLIP_HD double lesser_coef(double a, double b) { return is_nan(a) || a < b ? a : b; }

}  // namespace zclip
