// One use of a rule of math/rules.h, its arguments checked.

#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "../math/rules.h"
#include "rule_op.h"

namespace zclip::cpu {

class RuleCall {
 public:
  RuleCall(const RuleRow& row, const Tensor& state, int64_t count, std::vector<double> settings,
           const std::optional<Tensor>& loss, const char* op)
      : row_(row), settings_(std::move(settings)) {
    STD_TORCH_CHECK(static_cast<int64_t>(settings_.size()) == row.num_settings, "zclip::", op, ": ",
                    row.name, ": expected ", row.num_settings, " settings, got ", settings_.size());
    const char* problem = row.problem(settings_.data());
    STD_TORCH_CHECK(problem == nullptr, "zclip::", op, ": ", row.name, ": ", problem);
    if (!(row.state_may_be_empty && state.numel() == 0)) {
      state_ = state_of(state, row.state_size(settings_.data(), count), op);
    }
    if (loss.has_value()) loss_ = loss_of(*loss, op);
  }

  void apply(const GradStats* rows, int64_t count, double* coefs, float* verdict) const {
    row_.apply(rows, count, loss_.given ? &loss_.value : nullptr, settings_.data(), state_, coefs,
               verdict);
  }

  NonFinite nonfinite() const { return row_.nonfinite(settings_.data()); }

 private:
  const RuleRow& row_;
  std::vector<double> settings_;
  double* state_ = nullptr;
  Loss loss_ = {false, 0.0};
};

}  // namespace zclip::cpu
