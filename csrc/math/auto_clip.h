// AutoClip (Seetharaman et al. 2020): clip to a percentile of the norms seen so far.

#pragma once

#include "ring.h"
#include "rule.h"

namespace zclip {

// Columns of the float64 [kHistoryColumn + history] state: norms ever seen, then the last of them.
enum AutoClipColumn : int { kHistorySeenColumn = 3, kHistoryColumn };

struct AutoClipSettings {
  double percentile;
  int64_t history;
  OnNonFinite on_nonfinite;
};

constexpr int kHighestBit = 62;  // of a double that is not negative

// The value that `rank` others stand before in ascending order; none may be negative or NaN. Found
// bit by bit, since doubles >= 0 are ordered like their bits: no memory, no swaps, and on a GPU
// each count is one vote.
ZCLIP_HD double value_of_rank(const double* values, int64_t count, int64_t rank) {
  uint64_t answer = 0;
  for (int bit = kHighestBit; bit >= 0; --bit) {
    const uint64_t candidate = answer | uint64_t{1} << bit;
    double bound;
    memcpy(&bound, &candidate, sizeof bound);
    if (is_nan(bound)) continue;  // beyond infinity
    int64_t below = 0;
    for (int64_t i = 0; i < count; ++i) below += values[i] < bound ? 1 : 0;
    if (below <= rank) answer = candidate;
  }
  double value;
  memcpy(&value, &answer, sizeof value);
  return value;
}

// Linear between neighbours, as numpy.percentile; NaN if a value is; 0 if there are none.
ZCLIP_HD double percentile_of(const double* values, int64_t count, double percentile) {
  if (count == 0) return 0.0;
  for (int64_t i = 0; i < count; ++i) {
    if (is_nan(values[i])) return values[i];
  }
  const double rank = percentile / 100.0 * static_cast<double>(count - 1);
  const auto low = static_cast<int64_t>(rank);
  const double below = value_of_rank(values, count, low);
  if (low + 1 >= count) return below;
  int64_t not_above = 0;
  double above = static_cast<double>(INFINITY);
  for (int64_t i = 0; i < count; ++i) {
    not_above += values[i] <= below ? 1 : 0;
    if (values[i] > below && values[i] < above) above = values[i];
  }
  // Equal neighbours first: between two infinities there is nothing to interpolate.
  if (not_above > low + 1) return below;
  return below + (rank - static_cast<double>(low)) * (above - below);
}

// Two parts, so that a GPU can find the percentile between them with a whole block.
struct AutoClipStep {
  Health health;
  bool refused;
};

ZCLIP_HD Ring auto_clip_ring(double* state, int64_t history) {
  return {state + kHistoryColumn, history, state + kHistorySeenColumn};
}

ZCLIP_HD AutoClipStep auto_clip_begin(const Totals& total, int64_t history,
                                      OnNonFinite on_nonfinite, double* state) {
  const Health health = health_of(total);
  const bool refuse = refused(health, on_nonfinite);
  if (!refuse) push(auto_clip_ring(state, history), health.norm);
  return {health, refuse};
}

ZCLIP_HD double auto_clip_finish(const AutoClipStep& step, double threshold, double* state,
                                 float* verdict) {
  const double wanted = threshold / (step.health.norm + kNormEps);
  const double coef = step.refused ? kRefuse : wanted >= 1.0 ? kKeep : wanted;
  Report report = report_of(step.health, step.refused, coef);
  report.threshold = threshold;
  write_report(step.health, report, state, verdict);
  return coef;
}

ZCLIP_HD double auto_clip_rule(const Totals& total, double percentile, int64_t history,
                               OnNonFinite on_nonfinite, double* state, float* verdict) {
  const AutoClipStep step = auto_clip_begin(total, history, on_nonfinite, state);
  const Ring ring = auto_clip_ring(state, history);
  const double threshold = percentile_of(ring.values, filled(ring), percentile);
  return auto_clip_finish(step, threshold, state, verdict);
}

// Settings: those of AutoClipSettings, in order.
struct AutoClip : RuleDefaults {
  static constexpr int kNumSettings = 3;
  static constexpr bool kHasBlockForm = true;

  ZCLIP_HD static AutoClipSettings settings_of(const double* values) {
    return {values[0], static_cast<int64_t>(values[1]), on_nonfinite_of(values[2])};
  }
  static const char* problem(const double* settings) {
    const bool fits = settings[0] >= 0.0 && settings[0] <= 100.0 && settings[1] >= 1.0;
    return fits ? nullptr : "expected percentile 0 to 100 and history at least 1, got other values";
  }
  static int64_t state_size(const double* settings, int64_t) {
    return kHistoryColumn + settings_of(settings).history;
  }
  ZCLIP_HD static double coef(const Totals& total, const double*, const double* settings,
                              double* state, float* verdict) {
    const AutoClipSettings told = settings_of(settings);
    return auto_clip_rule(total, told.percentile, told.history, told.on_nonfinite, state, verdict);
  }
};

}  // namespace zclip
