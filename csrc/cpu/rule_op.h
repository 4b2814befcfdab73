// The two faces of every clip rule: judge() makes an operator from stats to coefficients of it,
// clip_by() one that also measures and scales, in one crossing from Python. Handing over a list of
// tensors costs more than measuring small ones.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "../math/totals.h"
#include "float_mode.h"
#include "ops.h"

namespace zclip::cpu {

using torch::headeronly::ScalarType;

// Returns the columns of a rule's state. Raises if it is not float64, contiguous and of that size.
double* state_of(const Tensor& state, int64_t size, const char* op);

// Returns the one element of a loss, or none if the tensor is empty. Raises for other shapes.
struct Loss {
  bool given;
  double value;
};
Loss loss_of(const Tensor& loss, const char* op);

// Makes a rule out of one that has a single coefficient for all: one(total, verdict) returns it.
template <typename One>
auto same_for_all(One one) {
  return [one](const GradStats* rows, int64_t count, double* coefs, float* verdict) {
    std::fill_n(coefs, count, one(total_of(rows, count), verdict));
  };
}

// Calls rule(rows, count, coefs, verdict), which fills the last two.
template <typename Rule>
Judged judge(const Tensor& stats, const char* op, Rule&& rule) {
  STD_TORCH_CHECK(stats.scalar_type() == ScalarType::Double && stats.is_contiguous() &&
                      stats.dim() == 2 && stats.size(1) == kNumStats,
                  "zclip::", op, ": stats must be a contiguous float64 tensor of shape [N, ",
                  kNumStats, "]");
  const FloatMode mode;
  const int64_t count = stats.size(0);
  Tensor coefs = torch::stable::new_empty(stats, {count}, ScalarType::Double);
  Tensor verdict = torch::stable::new_empty(stats, {kNumVerdict}, ScalarType::Float);
  rule(static_cast<const GradStats*>(stats.const_data_ptr()), count,
       static_cast<double*>(coefs.mutable_data_ptr()),
       static_cast<float*>(verdict.mutable_data_ptr()));
  return {coefs, verdict};
}

// Measured gradients and room for what is said about them.
struct Measured {
  Tensor norm;
  Tensor stats;
  Tensor coefs;
  Tensor verdict;
};
Measured make_results(const TensorList& grads);
void fill_measured(const Measured& results, const std::vector<GradStats>& rows, double norm);

template <typename Rule>
Clipped clip_by(const TensorList& grads, Rule&& rule, NonFinite nonfinite = NonFinite::kPropagate) {
  const Measured results = make_results(grads);
  const std::vector<GradStats> rows = measure(grads);
  const auto count = static_cast<int64_t>(rows.size());
  auto* coefs = static_cast<double*>(results.coefs.mutable_data_ptr());
  {
    const FloatMode mode;
    rule(rows.data(), count, coefs, static_cast<float*>(results.verdict.mutable_data_ptr()));
    fill_measured(results, rows, reported_norm(total_of(rows.data(), count), nonfinite));
  }
  if (nonfinite == NonFinite::kZero) zero_nonfinite_spans(grads, rows.data());
  scale_rows(grads, coefs);
  return {results.norm, results.stats, results.coefs, results.verdict};
}

}  // namespace zclip::cpu
