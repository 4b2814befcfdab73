// The arithmetic of clipping by one global norm, from per-tensor stats to one coefficient.

#pragma once

#include "rule.h"

namespace zclip {

// Fills the verdict, moves the counters if there are any, and returns the coefficient for every
// gradient.
ZCLIP_HD double global_norm_rule(const Totals& total, double max_norm, NonFinite mode,
                                 double* counters, float* verdict) {
  const Health health = health_of(total, mode);
  const bool blocked = unfit(health) && (mode == NonFinite::kSkip || mode == NonFinite::kError);
  double coef = kKeep;
  if (blocked) {
    coef = mode == NonFinite::kSkip ? kRefuse : kKeep;
  } else {
    const double wanted = max_norm / (health.norm + kNormEps);
    coef = wanted >= 1.0 ? kKeep : wanted;  // a NaN norm gives a NaN coefficient, as in torch
  }
  Report report = report_of(health, blocked, coef);
  report.threshold = max_norm;
  write_report(health, report, counters, verdict);
  return coef;
}

// Settings: max_norm, nonfinite.
struct GlobalNorm : RuleDefaults {
  static constexpr int kNumSettings = 2;
  static constexpr bool kStateMayBeEmpty = true;

  static int64_t state_size(const double*, int64_t) { return kNumCounters; }
  ZCLIP_HD static NonFinite nonfinite(const double* settings) {
    return static_cast<NonFinite>(static_cast<int>(settings[1]));
  }
  ZCLIP_HD static double coef(const Totals& total, const double*, const double* settings,
                              double* state, float* verdict) {
    return global_norm_rule(total, settings[0], nonfinite(settings), state, verdict);
  }
};

}  // namespace zclip
