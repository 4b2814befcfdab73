// AdaGC (arXiv 2502.11034): clip each tensor by the running average of its own norm. Three parts,
// so that a GPU can do the middle one for all tensors at once.

#pragma once

#include "rule.h"

namespace zclip {

// First of the gammas in the float64 [kGammaColumn + num_tensors] state. A gamma of 0 or less is
// not set: no norm that teaches anything is 0.
constexpr int kGammaColumn = 3;

enum class AdaGcSeed : int {
  kMinClipped = 0,  // least norm of the warm-up, after the global clip
  kMinRaw = 1,      // the same before the global clip
  kFirst = 2,       // the first norm after the global clip, averaged from then on
};

struct AdaGcSettings {
  double lambda_rel;
  double beta;
  double lambda_abs;
  double eps;
  int64_t warmup_steps;
  AdaGcSeed seed;
  OnNonFinite on_nonfinite;
};

struct AdaGcStep {
  bool refused;
  bool warming;
  double global_coef;
};

ZCLIP_HD AdaGcStep adagc_begin(const Health& health, const AdaGcSettings& settings,
                               const double* counters) {
  // Refused steps do not count, so that a run with a NaN learns what a run without it does.
  const double accepted = counters[kSteps] + 1.0 - counters[kSkipCount];
  const double wanted = settings.lambda_abs / (health.norm + settings.eps);
  return {refused(health, settings.on_nonfinite),
          accepted <= static_cast<double>(settings.warmup_steps), wanted < 1.0 ? wanted : kKeep};
}

// What the tensor is judged by: its gamma, or its own norm if it is new.
ZCLIP_HD double adagc_gamma(double gamma, double norm) { return gamma <= 0.0 ? norm : gamma; }

// Updates the gamma of one tensor and returns the coefficient of its gradient. A norm of exactly
// zero teaches nothing: with gamma at zero the tensor would never train again.
ZCLIP_HD double adagc_tensor(const AdaGcStep& step, const AdaGcSettings& settings, double norm,
                             double* gamma) {
  if (step.refused) return kRefuse;
  if (norm == 0.0) return kKeep;
  const double beta = settings.beta;
  const double before = adagc_gamma(*gamma, norm);
  double coef = kKeep, learned = before;
  if (step.warming) {
    coef = step.global_coef;
    const double seen = settings.seed == AdaGcSeed::kMinRaw ? norm : norm * coef;
    if (*gamma <= 0.0) {
      learned = seen;
    } else if (settings.seed == AdaGcSeed::kFirst) {
      learned = beta * before + (1.0 - beta) * seen;
    } else {
      learned = seen < before ? seen : before;
    }
  } else {
    const double limit = settings.lambda_rel * before;
    const bool over = norm > limit;
    if (over) coef = limit / (norm + settings.eps);
    learned = beta * before + (1.0 - beta) * (over ? limit : norm);
  }
  if (learned != 0.0) *gamma = learned;
  return coef;
}

// `worst_gamma` is what the worst tensor was judged by; `clipped_sumsq` the squared norm left over.
ZCLIP_HD void adagc_finish(const Health& health, const AdaGcStep& step,
                           const AdaGcSettings& settings, bool any_clipped, double clipped_sumsq,
                           double worst_gamma, double* counters, float* verdict) {
  Report report = {};
  report.blocked = step.refused;
  report.clipped = any_clipped && !step.refused;
  report.clipped_norm = step.refused ? 0.0 : sqrt(clipped_sumsq);
  report.mean = step.warming ? 0.0 : worst_gamma;
  report.threshold = step.warming ? settings.lambda_abs : settings.lambda_rel * worst_gamma;
  write_report(health, report, counters, verdict);
}

// All three, one tensor after the other.
ZCLIP_HD void adagc_rule(const GradStats* rows, int64_t count, const AdaGcSettings& settings,
                         double* state, double* coefs, float* verdict) {
  const Health health = health_of(total_of(rows, count));
  const AdaGcStep step = adagc_begin(health, settings, state);
  double* gammas = state + kGammaColumn;
  double worst_gamma = 0.0;
  if (health.worst >= 0) {
    worst_gamma = adagc_gamma(gammas[health.worst], norm_of(rows[health.worst]));
  }
  double clipped_sumsq = 0.0;
  bool any_clipped = false;
  for (int64_t i = 0; i < count; ++i) {
    const double norm = norm_of(rows[i]);
    coefs[i] = adagc_tensor(step, settings, norm, gammas + i);
    any_clipped |= !(coefs[i] >= 1.0);
    clipped_sumsq += norm * coefs[i] * (norm * coefs[i]);
  }
  adagc_finish(health, step, settings, any_clipped, clipped_sumsq, worst_gamma, state, verdict);
}

// Settings: those of AdaGcSettings, in order.
struct AdaGc : RuleDefaults {
  static constexpr int kNumSettings = 7;
  static constexpr bool kPerTensor = true;
  static constexpr bool kHasBlockForm = true;

  ZCLIP_HD static AdaGcSettings settings_of(const double* values) {
    return {values[0],
            values[1],
            values[2],
            values[3],
            static_cast<int64_t>(values[4]),
            static_cast<AdaGcSeed>(static_cast<int>(values[5])),
            on_nonfinite_of(values[6])};
  }
  static int64_t state_size(const double*, int64_t num_tensors) {
    return kGammaColumn + num_tensors;
  }
  ZCLIP_HD static void coefs(const GradStats* rows, int64_t count, const double*,
                             const double* settings, double* state, double* coefs, float* verdict) {
    adagc_rule(rows, count, settings_of(settings), state, coefs, verdict);
  }
};

}  // namespace zclip
