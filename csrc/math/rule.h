// What every clip rule is to the tables of rules.h: a struct of static functions over its settings,
// which travel as a vector of doubles in the order of its reference (zclip/reference).

#pragma once

#include "report.h"

namespace zclip {

// Settings of a rule travel by value to the device.
constexpr int kMaxSettings = 12;

// What a rule has unless it says otherwise. Besides, it has
//   static constexpr int kNumSettings;
//   static int64_t state_size(const double* settings, int64_t num_tensors);
// and, if there is one coefficient for all gradients,
//   static double coef(const Totals&, const double* loss, const double* settings, double* state,
//                      float* verdict);
// where loss is null if there is none; otherwise, with kPerTensor,
//   static void coefs(const GradStats* rows, int64_t count, const double* loss,
//                     const double* settings, double* state, double* coefs, float* verdict);
// All but state_size and problem are ZCLIP_HD.
struct RuleDefaults {
  static constexpr bool kPerTensor = false;
  static constexpr bool kStateMayBeEmpty = false;  // an empty state counts nothing
  static constexpr bool kHasBlockForm = false;     // cuda/apply_rule.cuh has one for whole blocks

  // What is wrong with the settings, or null.
  static const char* problem(const double* /*settings*/) { return nullptr; }
  // What becomes of NaN and Inf in the gradients themselves, and in the norm that is returned.
  ZCLIP_HD static NonFinite nonfinite(const double* /*settings*/) { return NonFinite::kPropagate; }
};

ZCLIP_HD OnNonFinite on_nonfinite_of(double setting) {
  return static_cast<OnNonFinite>(static_cast<int>(setting));
}

}  // namespace zclip
