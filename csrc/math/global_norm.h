// The arithmetic of clipping by one global norm, from per-tensor stats to one coefficient.

#pragma once

#include <math.h>
#include <cstdint>

#include "grad_stats.h"
#include "verdict.h"

namespace zclip {

// Columns of the float64 [kNumCounters] state; a state of size 0 counts nothing.
enum CounterColumn : int { kSteps = 0, kClipCount = 1, kSkipCount = 2, kNumCounters = 3 };

// torch adds this to the norm before dividing; a drop-in must as well.
constexpr double kNormEps = 1e-6;
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

// The norm as torch would report it: NaN or Inf if an element is.
ZCLIP_HD double reported_norm(const Totals& total, NonFinite mode) {
  if (mode != NonFinite::kZero) {
    if (total.sum.nan > 0.0) return static_cast<double>(NAN);
    if (total.sum.inf > 0.0) return static_cast<double>(INFINITY);
  }
  return sqrt(total.sum.sumsq);
}

// Fills the verdict, moves the counters if there are any, and returns the coefficient for every
// gradient.
ZCLIP_HD double global_norm_rule(const Totals& total, double max_norm, NonFinite mode,
                                 double* counters, float* verdict) {
  const double norm = reported_norm(total, mode);
  const bool bad = total.sum.nan + total.sum.inf > 0.0;
  const bool overflow = !bad && norm > kLargestFloat;
  const bool blocked = (bad || overflow) && (mode == NonFinite::kSkip || mode == NonFinite::kError);

  double coef = kKeep;
  if (blocked) {
    coef = mode == NonFinite::kSkip ? kRefuse : kKeep;
  } else {
    const double wanted = max_norm / (norm + kNormEps);
    coef = wanted >= 1.0 ? kKeep : wanted;  // a NaN norm gives a NaN coefficient, as in torch
  }
  const bool clipped = !blocked && !(coef >= 1.0);

  int flags = (total.sum.nan > 0.0 ? kHasNan : 0) | (total.sum.inf > 0.0 ? kHasInf : 0);
  flags |= (overflow ? kOverflow : 0) | (clipped ? kClipped : 0);
  for (int column = 0; column < kNumVerdict; ++column) verdict[column] = 0.0f;
  verdict[kBlocked] = blocked ? 1.0f : 0.0f;
  verdict[kFlags] = static_cast<float>(flags);
  verdict[kNorm] = static_cast<float>(norm);
  verdict[kClippedNorm] = static_cast<float>(coef == kRefuse ? 0.0 : norm * coef);
  verdict[kThreshold] = static_cast<float>(max_norm);
  verdict[kWorst] = static_cast<float>(total.worst);
  if (counters != nullptr) {
    counters[kSteps] += 1.0;
    counters[kClipCount] += clipped ? 1.0 : 0.0;
    counters[kSkipCount] += blocked ? 1.0 : 0.0;
    verdict[kStep] = static_cast<float>(counters[kSteps]);
    verdict[kClips] = static_cast<float>(counters[kClipCount]);
    verdict[kSkips] = static_cast<float>(counters[kSkipCount]);
  }
  return coef;
}

}  // namespace zclip
