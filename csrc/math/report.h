// What every clip rule ends with: the step is counted and the verdict written.

#pragma once

#include "totals.h"

namespace zclip {

// First columns of every rule's float64 state. A state of zeros is a fresh one, for every rule.
enum CounterColumn : int { kSteps = 0, kClipCount = 1, kSkipCount = 2, kNumCounters = 3 };

// torch adds this to the norm before dividing; a drop-in must as well.
constexpr double kNormEps = 1e-6;

// What a rule found. Fields it does not have stay 0.
struct Report {
  bool blocked;
  bool clipped;
  double clipped_norm;
  int flags;
  double z;
  double threshold;
  double mean;
  double std;
  double loss;
};

// The report of a rule that has one coefficient for all gradients.
ZCLIP_HD Report report_of(const Health& health, bool blocked, double coef) {
  Report report = {};
  report.blocked = blocked;
  report.clipped = !blocked && !(coef >= 1.0);  // a NaN coefficient has changed the gradients too
  report.clipped_norm = coef == kRefuse ? 0.0 : health.norm * coef;
  return report;
}

// Counts the step, unless `counters` is null, and fills the verdict.
ZCLIP_HD void write_report(const Health& health, const Report& report, double* counters,
                           float* verdict) {
  int flags = report.flags | (health.has_nan ? kHasNan : 0) | (health.has_inf ? kHasInf : 0);
  flags |= (health.overflow ? kOverflow : 0) | (report.clipped ? kClipped : 0);
  for (int column = 0; column < kNumVerdict; ++column) verdict[column] = 0.0f;
  verdict[kBlocked] = report.blocked ? 1.0f : 0.0f;
  verdict[kFlags] = static_cast<float>(flags);
  verdict[kNorm] = static_cast<float>(health.norm);
  verdict[kClippedNorm] = static_cast<float>(report.clipped_norm);
  verdict[kZ] = static_cast<float>(report.z);
  verdict[kThreshold] = static_cast<float>(report.threshold);
  verdict[kMean] = static_cast<float>(report.mean);
  verdict[kStd] = static_cast<float>(report.std);
  verdict[kLoss] = static_cast<float>(report.loss);
  verdict[kWorst] = static_cast<float>(health.worst);
  if (counters == nullptr) return;
  counters[kSteps] += 1.0;
  counters[kClipCount] += report.clipped ? 1.0 : 0.0;
  counters[kSkipCount] += report.blocked ? 1.0 : 0.0;
  verdict[kStep] = static_cast<float>(counters[kSteps]);
  verdict[kClips] = static_cast<float>(counters[kClipCount]);
  verdict[kSkips] = static_cast<float>(counters[kSkipCount]);
}

}  // namespace zclip
