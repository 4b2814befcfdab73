// The gradients as one vector: what the rows of stats amount to, and whether to learn from it.

#pragma once

#include <math.h>
#include <cstdint>

#include "grad_stats.h"
#include "verdict.h"

namespace zclip {

constexpr double kLargestFloat = 3.4028234663852886e38;

struct Totals {
  GradStats sum;
  int64_t worst;  // -1 if there are no tensors
};

// Rows are added in index order, so that every backend gets the same bits.
ZCLIP_HD Totals total_of(const GradStats* rows, int64_t count) {
  Totals total = {{0.0, 0.0, 0.0}, -1};
  double largest = -1.0;
  bool found_bad = false;
  for (int64_t i = 0; i < count; ++i) {
    const bool bad = rows[i].nan + rows[i].inf > 0.0;
    if (bad ? !found_bad : !found_bad && rows[i].sumsq > largest) {
      total.worst = i;
      largest = rows[i].sumsq;
      found_bad = bad;
    }
    merge(total.sum, rows[i]);
  }
  return total;
}

// A norm as torch would report it: NaN or Inf if an element is.
ZCLIP_HD double norm_of(const GradStats& stats) {
  if (stats.nan > 0.0) return static_cast<double>(NAN);
  if (stats.inf > 0.0) return static_cast<double>(INFINITY);
  return sqrt(stats.sumsq);
}

ZCLIP_HD double reported_norm(const Totals& total, NonFinite mode) {
  return mode == NonFinite::kZero ? sqrt(total.sum.sumsq) : norm_of(total.sum);
}

struct Health {
  double norm;
  bool has_nan;
  bool has_inf;
  bool overflow;  // every element is finite and the norm is not, in float32
  int64_t worst;
};

ZCLIP_HD Health health_of(const Totals& total, NonFinite mode = NonFinite::kPropagate) {
  const double norm = reported_norm(total, mode);
  const bool has_nan = total.sum.nan > 0.0, has_inf = total.sum.inf > 0.0;
  return {norm, has_nan, has_inf, !has_nan && !has_inf && norm > kLargestFloat, total.worst};
}

// True if nothing should be learned from these gradients.
ZCLIP_HD bool unfit(const Health& health) {
  return health.has_nan || health.has_inf || health.overflow;
}

ZCLIP_HD bool refused(const Health& health, OnNonFinite on_nonfinite) {
  return on_nonfinite == OnNonFinite::kSkip && unfit(health);
}

}  // namespace zclip
