// Watch the loss: is it a number, is it far above its average, has it been rising.

#pragma once

#include "report.h"

namespace zclip {

// Columns of the float64 [kNumLossState] state. Of its counters, kClipCount counts spikes and
// kSkipCount the losses that are NaN or Inf.
enum LossColumn : int {
  kLossMeanColumn = 3,
  kLossDeviationColumn,
  kLossesAbsorbedColumn,
  kLastLossColumn,
  kRisingColumn,
  kNumLossState
};

constexpr double kDeviations = 8.0;  // mean absolute ones; 6.4 standard deviations of normal noise
constexpr double kSmallestScale =
    1e-8;  // a loss that was exactly 0 so far may become a little more

struct LossSettings {
  double factor;
  int64_t rising_steps;
  double decay;
  int64_t warmup_steps;
};

// The rule is told in zclip/reference/watch_loss.py. Neither a NaN nor a spike is learned from.
ZCLIP_HD void watch_loss_rule(double loss, const LossSettings& settings, double* state,
                              float* verdict) {
  const double mean = state[kLossMeanColumn], deviation = state[kLossDeviationColumn];
  const double absorbed = state[kLossesAbsorbedColumn];
  const bool finite = is_finite(loss), first = absorbed == 0.0;

  double scale = fabs(mean) < kDeviations * deviation ? kDeviations * deviation : fabs(mean);
  if (scale < kSmallestScale) scale = kSmallestScale;
  const double distance = first && finite ? 0.0 : loss - mean;
  const double ratio = 1.0 + distance / scale;
  const bool spike = finite && !first && absorbed >= static_cast<double>(settings.warmup_steps) &&
                     ratio > settings.factor;

  state[kSteps] += 1.0;
  state[kClipCount] += spike ? 1.0 : 0.0;
  state[kSkipCount] += finite ? 0.0 : 1.0;
  bool rising = false;
  if (finite) {
    state[kRisingColumn] =
        !first && loss > state[kLastLossColumn] ? state[kRisingColumn] + 1.0 : 0.0;
    state[kLastLossColumn] = loss;
    rising = settings.rising_steps > 0 &&
             state[kRisingColumn] >= static_cast<double>(settings.rising_steps);
  }
  if (finite && !spike) {
    const double share = 1.0 / (absorbed + 1.0), least = 1.0 - settings.decay;
    const double weight = share < least ? least : share;
    state[kLossMeanColumn] = first ? loss : mean + weight * distance;
    state[kLossDeviationColumn] = deviation + weight * (fabs(distance) - deviation);
    state[kLossesAbsorbedColumn] = absorbed + 1.0;
  }

  const int flags = static_cast<int>(verdict[kFlags]) | (finite ? 0 : kLossNan) |
                    (spike ? kLossSpike : 0) | (rising ? kLossRising : 0);
  verdict[kFlags] = static_cast<float>(flags);
  verdict[kLoss] = static_cast<float>(loss);
  verdict[kLossRatio] = static_cast<float>(ratio);
  if (!finite) verdict[kBlocked] = 1.0f;
}

}  // namespace zclip
