// Skip a step whose norm or loss stands out of a window of those before it, as OLMo-core does.

#pragma once

#include "ring.h"
#include "rule.h"

namespace zclip {

// Columns of the float64 [kWindowColumn + 2 * window] state: values ever accepted, norms, losses.
enum SpikeSkipColumn : int { kNormsSeenColumn = 3, kLossesSeenColumn, kWindowColumn };

// Of |mean|: a window of equal values must not make rounding noise a spike.
constexpr double kStdFloor = 1e-6;

struct SpikeSkipSettings {
  int64_t window;
  double sigma;
  int64_t min_count;
  OnNonFinite on_nonfinite;
};

// A value seen against its window; all zero while the window is too short to judge.
struct WindowView {
  bool is_spike;
  double z;
  double threshold;
  double mean;
  double std;
};

ZCLIP_HD WindowView view_of(const Ring& ring, double value, const SpikeSkipSettings& settings) {
  const int64_t count = filled(ring);
  if (count < 2 || count < settings.min_count) return {false, 0.0, 0.0, 0.0, 0.0};
  double sum = 0.0, squares = 0.0;
  for (int64_t i = 0; i < count; ++i) sum += ring.values[i];
  const double mean = sum / static_cast<double>(count);
  for (int64_t i = 0; i < count; ++i) {
    squares += (ring.values[i] - mean) * (ring.values[i] - mean);
  }
  double std = sqrt(squares / static_cast<double>(count - 1));  // unbiased, as in OLMo-core
  const double floor = kStdFloor * fabs(mean);
  if (settings.on_nonfinite == OnNonFinite::kSkip && std < floor) std = floor;
  // Not "value > threshold": a NaN must be refused.
  const bool is_spike = !(value - mean <= settings.sigma * std);
  return {is_spike, (value - mean) / std, mean + settings.sigma * std, mean, std};
}

// `loss` is null if there is none.
ZCLIP_HD double spike_skip_rule(const Totals& total, const double* loss,
                                const SpikeSkipSettings& settings, double* state, float* verdict) {
  const Health health = health_of(total);
  const bool official = settings.on_nonfinite == OnNonFinite::kOfficial;
  const Ring norms = {state + kWindowColumn, settings.window, state + kNormsSeenColumn};
  const Ring losses = {state + kWindowColumn + settings.window, settings.window,
                       state + kLossesSeenColumn};
  const WindowView norm_view = view_of(norms, health.norm, settings);
  const bool bad_loss = loss != nullptr && !is_finite(*loss);
  const bool far_loss = loss != nullptr && view_of(losses, *loss, settings).is_spike;

  const bool is_unfit = !official && (unfit(health) || bad_loss);
  const bool norm_spike = norm_view.is_spike && !is_unfit;
  const bool loss_spike = far_loss && !is_unfit;
  const bool refuse = is_unfit || norm_spike || loss_spike;
  if (official || !refuse) {
    push(norms, health.norm);
    if (loss != nullptr) push(losses, *loss);
  }

  Report report = report_of(health, refuse, refuse ? kRefuse : kKeep);
  report.flags =
      (norm_spike ? kSpike : 0) | (bad_loss ? kLossNan : 0) | (loss_spike ? kLossSpike : 0);
  report.z = norm_view.z;
  report.threshold = norm_view.threshold;
  report.mean = norm_view.mean;
  report.std = norm_view.std;
  report.loss = loss == nullptr ? 0.0 : *loss;
  write_report(health, report, state, verdict);
  return refuse ? kRefuse : kKeep;
}

// Settings: those of SpikeSkipSettings, in order.
struct SpikeSkip : RuleDefaults {
  static constexpr int kNumSettings = 4;

  ZCLIP_HD static SpikeSkipSettings settings_of(const double* values) {
    return {static_cast<int64_t>(values[0]), values[1], static_cast<int64_t>(values[2]),
            on_nonfinite_of(values[3])};
  }
  static const char* problem(const double* settings) {
    return settings[0] >= 1.0 ? nullptr : "window: expected at least 1, got less";
  }
  static int64_t state_size(const double* settings, int64_t) {
    return kWindowColumn + 2 * settings_of(settings).window;
  }
  ZCLIP_HD static double coef(const Totals& total, const double* loss, const double* settings,
                              double* state, float* verdict) {
    return spike_skip_rule(total, loss, settings_of(settings), state, verdict);
  }
};

}  // namespace zclip
