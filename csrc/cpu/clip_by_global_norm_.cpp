// CPU backend of zclip::clip_by_global_norm_: grad_stats, global_norm_ and scale_ in one crossing
// from Python. Handing over a list of tensors costs more than measuring small ones.

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "ops.h"

namespace zclip::cpu {

std::tuple<Tensor, Tensor, Tensor, Tensor> clip_by_global_norm_(std::vector<Tensor> grads,
                                                                Tensor state, double max_norm,
                                                                int64_t nonfinite) {
  using torch::headeronly::ScalarType;
  const TensorList list(grads, TensorList::Access::kWrite, "clip_by_global_norm_", "grads");
  double* counters = counters_of(state, "clip_by_global_norm_");
  const auto mode = static_cast<NonFinite>(nonfinite);
  const auto count = static_cast<int64_t>(grads.size());
  const ScalarType norm_type = list.has_float64() ? ScalarType::Double : ScalarType::Float;
  Tensor norm = torch::stable::new_empty(state, {}, norm_type);
  Tensor stats = torch::stable::new_empty(state, {count, kNumStats}, ScalarType::Double);
  Tensor coefs = torch::stable::new_empty(state, {count}, ScalarType::Double);
  Tensor verdict = torch::stable::new_empty(state, {kNumVerdict}, ScalarType::Float);

  const std::vector<GradStats> rows = measure(list);
  const Totals total = total_of(rows.data(), count);
  const double coef = global_norm_rule(total, max_norm, mode, counters,
                                       static_cast<float*>(verdict.mutable_data_ptr()));
  auto* coef_of = static_cast<double*>(coefs.mutable_data_ptr());
  std::fill_n(coef_of, count, coef);
  std::copy(rows.begin(), rows.end(), static_cast<GradStats*>(stats.mutable_data_ptr()));
  if (list.has_float64()) {
    *static_cast<double*>(norm.mutable_data_ptr()) = reported_norm(total, mode);
  } else {
    *static_cast<float*>(norm.mutable_data_ptr()) = static_cast<float>(reported_norm(total, mode));
  }

  if (mode == NonFinite::kZero) zero_nonfinite_spans(list, rows.data());
  scale_spans(list, coef_of);
  return {norm, stats, coefs, verdict};
}

}  // namespace zclip::cpu
