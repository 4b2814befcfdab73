// CPU backend of zclip::global_norm_: from stats to coefficients. The arithmetic is in math/.

#include "../math/global_norm.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "ops.h"

namespace zclip::cpu {

using torch::headeronly::ScalarType;

double* counters_of(const Tensor& state, const char* op) {
  const int64_t size = state.numel();
  STD_TORCH_CHECK(state.scalar_type() == ScalarType::Double && state.is_contiguous() &&
                      (size == 0 || size == kNumCounters),
                  "zclip::", op, ": state must be a contiguous float64 tensor of ", kNumCounters,
                  " or 0 elements, got ", size);
  return size == 0 ? nullptr : static_cast<double*>(state.mutable_data_ptr());
}

std::tuple<Tensor, Tensor> global_norm_(Tensor state, Tensor stats, double max_norm,
                                        int64_t nonfinite) {
  STD_TORCH_CHECK(stats.scalar_type() == ScalarType::Double && stats.is_contiguous() &&
                      stats.dim() == 2 && stats.size(1) == kNumStats,
                  "zclip::global_norm_: stats must be a contiguous float64 tensor of shape [N, 3]");
  double* counters = counters_of(state, "global_norm_");
  const int64_t count = stats.size(0);
  Tensor coefs = torch::stable::new_empty(stats, {count}, ScalarType::Double);
  Tensor verdict = torch::stable::new_empty(stats, {kNumVerdict}, ScalarType::Float);

  const Totals total = total_of(static_cast<const GradStats*>(stats.const_data_ptr()), count);
  const double coef = global_norm_rule(total, max_norm, static_cast<NonFinite>(nonfinite), counters,
                                       static_cast<float*>(verdict.mutable_data_ptr()));
  std::fill_n(static_cast<double*>(coefs.mutable_data_ptr()), count, coef);
  return {coefs, verdict};
}

}  // namespace zclip::cpu
