// ZClip (arXiv 2504.02507): clip a norm that is an outlier among the norms before it.

#pragma once

#include "rule.h"

namespace zclip {

// Columns of the float64 [kBufferColumn + warmup_length] state, after the counters. Warm-up is over
// once kSeenColumn has reached the warm-up length; until then the norms stand in the buffer.
enum ZClipColumn : int { kMeanColumn = 3, kVarColumn, kSeenColumn, kBufferColumn };

enum class ZClipMode : int { kAdaptiveScaling = 0, kMean = 1, kPercentile = 2 };

struct ZClipSettings {
  double alpha;
  double z_thresh;
  double max_grad_norm;  // infinity: no limit
  double eps;
  int64_t warmup_steps;
  ZClipMode mode;
  double clip_factor;
  bool skip_update_on_spike;
  bool skip_step_on_spike;
  OnNonFinite on_nonfinite;
};

// Upstream stores a norm before it asks whether warm-up is over, so 0 steps are 1.
ZCLIP_HD int64_t warmup_length(int64_t warmup_steps) { return warmup_steps < 1 ? 1 : warmup_steps; }

// Stores a norm of the warm-up; the last one sets mean and population variance, in two passes.
ZCLIP_HD void zclip_warm_up(double* state, double norm, int64_t length) {
  double* buffer = state + kBufferColumn;
  const auto seen = static_cast<int64_t>(state[kSeenColumn]);
  buffer[seen] = norm;
  state[kSeenColumn] += 1.0;
  if (seen + 1 < length) return;
  double sum = 0.0, squares = 0.0;
  for (int64_t i = 0; i < length; ++i) sum += buffer[i];
  const double mean = sum / static_cast<double>(length);
  for (int64_t i = 0; i < length; ++i) squares += (buffer[i] - mean) * (buffer[i] - mean);
  state[kMeanColumn] = mean;
  state[kVarColumn] = squares / static_cast<double>(length);
}

ZCLIP_HD double zclip_rule(const Totals& total, const ZClipSettings& settings, double* state,
                           float* verdict) {
  const Health health = health_of(total);
  const double norm = health.norm, limit = settings.max_grad_norm;
  const bool refuse = refused(health, settings.on_nonfinite);
  const int64_t length = warmup_length(settings.warmup_steps);

  if (state[kSeenColumn] < static_cast<double>(length)) {
    const double wanted = is_inf(limit) ? kKeep : limit / (norm + kNormEps);
    const double coef = refuse ? kRefuse : wanted >= 1.0 ? kKeep : wanted;
    if (!refuse) zclip_warm_up(state, norm, length);
    Report report = report_of(health, refuse, coef);
    report.threshold = limit;
    write_report(health, report, state, verdict);
    return coef;
  }

  const double mean = state[kMeanColumn], std = sqrt(state[kVarColumn]);
  const double z = (norm - mean) / (std + settings.eps);
  double threshold = mean + settings.z_thresh * (std + settings.eps);
  double target = mean;
  bool spike = z > settings.z_thresh;
  if (settings.mode == ZClipMode::kPercentile) {
    threshold = target = mean + settings.z_thresh * std;
    spike = norm > threshold;
  } else if (settings.mode == ZClipMode::kAdaptiveScaling) {
    target = (mean + settings.z_thresh * std / (z / settings.z_thresh)) * settings.clip_factor;
  }
  spike = spike && !refuse;

  // Comparisons are written so that a NaN falls on the side where Python's min() lets it fall.
  const double learned = spike ? target : norm;
  const double allowed = limit < learned ? limit : learned;
  const bool blocked = refuse || (spike && settings.skip_step_on_spike);
  double coef = norm > allowed ? allowed / (norm + kNormEps) : kKeep;
  if (blocked) coef = kRefuse;

  if (!refuse && !(spike && settings.skip_update_on_spike)) {
    const double alpha = settings.alpha;
    const double new_mean = alpha * mean + (1.0 - alpha) * learned;
    const double distance = learned - new_mean;
    state[kMeanColumn] = new_mean;
    state[kVarColumn] = alpha * state[kVarColumn] + (1.0 - alpha) * (distance * distance);
  }
  Report report = report_of(health, blocked, coef);
  report.flags = spike ? kSpike : 0;
  report.z = z;
  report.threshold = limit < threshold ? limit : threshold;
  report.mean = mean;
  report.std = std;
  write_report(health, report, state, verdict);
  return coef;
}

// Settings: those of ZClipSettings, in order.
struct ZClip : RuleDefaults {
  static constexpr int kNumSettings = 10;

  ZCLIP_HD static ZClipSettings settings_of(const double* values) {
    return {values[0],
            values[1],
            values[2],
            values[3],
            static_cast<int64_t>(values[4]),
            static_cast<ZClipMode>(static_cast<int>(values[5])),
            values[6],
            values[7] != 0.0,
            values[8] != 0.0,
            on_nonfinite_of(values[9])};
  }
  static int64_t state_size(const double* settings, int64_t) {
    return kBufferColumn + warmup_length(settings_of(settings).warmup_steps);
  }
  ZCLIP_HD static double coef(const Totals& total, const double*, const double* settings,
                              double* state, float* verdict) {
    return zclip_rule(total, settings_of(settings), state, verdict);
  }
};

}  // namespace zclip
