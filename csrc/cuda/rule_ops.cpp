// CUDA backend of zclip::rule_ and zclip::clip_by_, for any rule of math/rules.h, and of
// watch_loss_: checks and launches. rule_ is one launch, clip_by_ two.

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <tuple>

#include "../reference_rule.h"
#include "rule_op.h"

namespace zclip::cuda {
namespace {

using torch::headeronly::ScalarType;
using Access = DeviceList::Access;

// The row of a rule that kernels can apply, or null: then its reference answers.
const RuleRow* find_device_rule(int64_t rule) {
  const RuleRow* row = find_rule(rule);
  return row != nullptr && row->on_device ? row : nullptr;
}

// The rule with its arguments, checked, as it travels to the device.
Rule rule_for(const RuleRow& row, const Tensor& state, int64_t count,
              const std::vector<double>& settings, const std::optional<Tensor>& loss,
              const Place& place, const char* op) {
  STD_TORCH_CHECK(static_cast<int64_t>(settings.size()) == row.num_settings, "zclip::", op, ": ",
                  row.name, ": expected ", row.num_settings, " settings, got ", settings.size());
  const char* problem = row.problem(settings.data());
  STD_TORCH_CHECK(problem == nullptr, "zclip::", op, ": ", row.name, ": ", problem);
  Rule rule = {};
  rule.id = row.id;
  std::copy(settings.begin(), settings.end(), rule.settings);
  const bool is_empty = row.state_may_be_empty && state.numel() == 0;
  double* columns =
      state_of(state, is_empty ? 0 : row.state_size(settings.data(), count), place, op);
  rule.state = is_empty ? nullptr : columns;
  if (loss.has_value()) rule.loss = loss_of(*loss, place, op);
  return rule;
}

// Fills in the norm and clips nothing.
Rule only_measure() {
  Rule rule = {};
  rule.id = RuleId::kGlobalNorm;
  rule.settings[0] = static_cast<double>(INFINITY);
  return rule;
}

// Measures and applies the rule, in one launch; where no kernel can, its reference answers.
Results decide(const DeviceList& list, const Tensor& like, const RuleRow* row, const Tensor& state,
               int64_t rule, const std::vector<double>& settings, const std::optional<Tensor>& loss,
               const Place& place, const char* op) {
  const Rule told = row == nullptr ? only_measure()
                                   : rule_for(*row, state, list.count(), settings, loss, place, op);
  Results results = make_results(list, like);
  const Tensor scratch = list.scratch(like);
  check_launch(launch_grad_stats(list.data(), list.count(), scratch.mutable_data_ptr(),
                                 results.rows(), &told, results.judgement(), place.queue()),
               op);
  if (row == nullptr) {
    std::tie(results.coefs, results.verdict) =
        reference_rule(state, results.stats, rule, settings, loss);
  }
  return results;
}

}  // namespace

Clipped decide_by_(std::vector<Tensor> grads, Tensor state, int64_t rule,
                   std::vector<double> settings, std::optional<Tensor> loss) {
  const char* op = "decide_by_";
  const Tensor& like = first_of(grads, state);
  const Place place(like);
  const DeviceList list(grads, place, Access::kRead, op, "grads");
  return decide(list, like, find_device_rule(rule), state, rule, settings, loss, place, op)
      .clipped();
}

Judged rule_(Tensor state, Tensor stats, int64_t rule, std::vector<double> settings,
             std::optional<Tensor> loss) {
  const char* op = "rule_";
  const RuleRow* row = find_device_rule(rule);
  if (row == nullptr) return reference_rule(state, stats, rule, settings, loss);
  STD_TORCH_CHECK(stats.scalar_type() == ScalarType::Double && stats.is_contiguous() &&
                      stats.dim() == 2 && stats.size(1) == kNumStats,
                  "zclip::", op, ": stats: expected a contiguous float64 tensor of shape [N, ",
                  kNumStats, "], got ", stats.numel(), " elements");
  const Place place(stats);
  const int64_t count = stats.size(0);
  const Rule told = rule_for(*row, state, count, settings, loss, place, op);
  const Tensor coefs = torch::stable::new_empty(stats, {count}, ScalarType::Double);
  const Tensor verdict = torch::stable::new_empty(stats, {kNumVerdict}, ScalarType::Float);
  const Judgement out = {static_cast<double*>(coefs.mutable_data_ptr()),
                         static_cast<float*>(verdict.mutable_data_ptr()), nullptr, false};
  check_launch(launch_rule(told, static_cast<const GradStats*>(stats.const_data_ptr()), count, out,
                           place.queue()),
               op);
  return {coefs, verdict};
}

Clipped clip_by_(std::vector<Tensor> grads, Tensor state, int64_t rule,
                 std::vector<double> settings, std::optional<Tensor> loss) {
  const char* op = "clip_by_";
  const Place place(first_of(grads, state));
  DeviceList list(grads, place, Access::kWrite, op, "grads");
  const RuleRow* row = find_device_rule(rule);
  // Like the gradients: a state on another device must not decide where results lie.
  const Tensor& like = first_of(grads, state);
  const Results results = decide(list, like, row, state, rule, settings, loss, place, op);
  const bool drops = row != nullptr && row->nonfinite(settings.data()) == NonFinite::kZero;
  check_launch(launch_scale(list.data(), list.count(), results.judgement().coefs,
                            drops ? results.rows() : nullptr, place.queue()),
               op);
  list.write_back();
  return results.clipped();
}

void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps) {
  const char* op = "watch_loss_";
  const Place place(state);
  double* columns = state_of(state, kNumLossState, place, op);
  STD_TORCH_CHECK(place.holds(verdict) && verdict.scalar_type() == ScalarType::Float &&
                      verdict.is_contiguous() && verdict.numel() == kNumVerdict,
                  "zclip::watch_loss_: verdict: expected a contiguous float32 tensor of ",
                  kNumVerdict, " elements on ", place.name(), ", got ", verdict.numel());
  const DeviceNumber number = loss_of(loss, place, op);
  if (number.address == nullptr) return;
  check_launch(launch_watch_loss(number, {factor, rising_steps, decay, warmup_steps}, columns,
                                 static_cast<float*>(verdict.mutable_data_ptr()), place.queue()),
               op);
}

}  // namespace zclip::cuda
