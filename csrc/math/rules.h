// Every clip rule that has compiled code, once. The number is the place of the rule in RULES of
// zclip/reference/rules.py; tests/test_layers.py compares the two. A rule that stands only there is
// answered by its reference, on every device.

#pragma once

#include "adagc.h"
#include "auto_clip.h"
#include "global_norm.h"
#include "spike_skip.h"
#include "zclip.h"

// ROW(number, name, type)
#define ZCLIP_RULES(ROW)          \
  ROW(0, global_norm, GlobalNorm) \
  ROW(1, zclip, ZClip)            \
  ROW(2, adagc, AdaGc)            \
  ROW(3, spike_skip, SpikeSkip)   \
  ROW(4, auto_clip, AutoClip)

namespace zclip {

enum class RuleId : int32_t {
#define ZCLIP_ID(number, name, Type) k##Type = number,
  ZCLIP_RULES(ZCLIP_ID)
#undef ZCLIP_ID
};

// A rule as the host sees it.
struct RuleRow {
  RuleId id;
  const char* name;
  int num_settings;
  bool state_may_be_empty;
  bool on_device;  // apply_rule.cuh can apply it
  const char* (*problem)(const double* settings);
  int64_t (*state_size)(const double* settings, int64_t num_tensors);
  NonFinite (*nonfinite)(const double* settings);
  // One tensor after the other; fills coefs and verdict.
  void (*apply)(const GradStats* rows, int64_t count, const double* loss, const double* settings,
                double* state, double* coefs, float* verdict);
};

template <typename Rule>
inline void apply_one_by_one(const GradStats* rows, int64_t count, const double* loss,
                             const double* settings, double* state, double* coefs, float* verdict) {
  if constexpr (Rule::kPerTensor) {
    Rule::coefs(rows, count, loss, settings, state, coefs, verdict);
  } else {
    const double coef = Rule::coef(total_of(rows, count), loss, settings, state, verdict);
    for (int64_t i = 0; i < count; ++i) coefs[i] = coef;
  }
}

template <typename Rule>
constexpr RuleRow row_of(RuleId id, const char* name) {
  static_assert(Rule::kNumSettings <= kMaxSettings, "raise kMaxSettings in rule.h");
  return {id,
          name,
          Rule::kNumSettings,
          Rule::kStateMayBeEmpty,
          !Rule::kPerTensor || Rule::kHasBlockForm,
          Rule::problem,
          Rule::state_size,
          Rule::nonfinite,
          apply_one_by_one<Rule>};
}

// Returns the row of a rule, or null if it has no compiled code.
inline const RuleRow* find_rule(int64_t id) {
  static constexpr RuleRow kRows[] = {
#define ZCLIP_ROW(number, name, Type) row_of<Type>(RuleId::k##Type, #name),
      ZCLIP_RULES(ZCLIP_ROW)
#undef ZCLIP_ROW
  };
  for (const RuleRow& row : kRows) {
    if (static_cast<int64_t>(row.id) == id) return &row;
  }
  return nullptr;
}

}  // namespace zclip
