// CPU backend of zclip::fused_step_: measure, apply the clip rule and update, in one crossing from
// Python that hands over no list. Parameters and state stand in a plan, gradients were read.

#include <memory>

#include "loss_watch.h"
#include "numbered.h"
#include "ops.h"
#include "reading.h"
#include "rule_call.h"
#include "update_plan.h"

namespace zclip::cpu {
namespace {

constexpr int64_t kNoRule = -1;

Numbered<UpdatePlan>& plans() {
  static auto* const kept = new Numbered<UpdatePlan>;  // tensors must not outlive torch at exit
  return *kept;
}

std::vector<GradStats> rows_in(const Tensor& stats, int64_t count, const char* op) {
  STD_TORCH_CHECK(stats.is_cpu() && stats.scalar_type() == ScalarType::Double &&
                      stats.is_contiguous() && stats.numel() == count * kNumStats,
                  "zclip::", op, ": stats: expected a contiguous float64 tensor of shape [", count,
                  ", ", kNumStats, "] on the CPU, got ", stats.numel(), " elements");
  const auto* rows = static_cast<const GradStats*>(stats.const_data_ptr());
  return {rows, rows + count};
}

}  // namespace

int64_t make_plan(std::vector<Tensor> params, std::vector<Tensor> firsts,
                  std::vector<Tensor> seconds, std::vector<Tensor> maxima,
                  std::vector<Tensor> steps, Tensor ledger, int64_t algorithm,
                  std::vector<int64_t> sizes, bool telemetry) {
  return plans().add(std::make_shared<UpdatePlan>(
      static_cast<Algorithm>(algorithm), std::move(params),
      OptimState{std::move(firsts), std::move(seconds), std::move(maxima), std::move(steps)},
      std::move(ledger), std::move(sizes), telemetry, "make_plan"));
}

void drop_plan(int64_t plan) { plans().drop(plan); }

Stepped fused_step_(int64_t reading, int64_t plan, Tensor state, int64_t rule,
                    std::vector<double> rule_settings, std::optional<Tensor> loss,
                    std::vector<double> settings, double grad_scale, bool found_inf,
                    bool skip_nonfinite, int64_t seed, std::optional<Tensor> known,
                    std::optional<Tensor> watch, std::optional<Tensor> watched,
                    std::vector<double> watch_settings) {
  const char* op = "fused_step_";
  const std::shared_ptr<const TensorList> read = take_reading(reading, op);
  const TensorList& list = *read;
  const std::shared_ptr<UpdatePlan> held = plans().find(plan);
  STD_TORCH_CHECK(
      held != nullptr,
      "zclip::fused_step_: plan: expected one that make_plan returned and drop_plan has not had, "
      "got ",
      plan);
  if (!held->is_current()) {
    const Tensor none = empty_on_cpu({0}, ScalarType::Float);
    return {none, none, none, none, none, none};
  }
  const int64_t count = held->count();
  check_settings(settings, held->num_groups(), op);
  held->check_gradients(list, op);
  const bool has_rule = rule != kNoRule;
  const RuleRow* row = has_rule ? find_rule(rule) : nullptr;
  STD_TORCH_CHECK(!has_rule || row != nullptr, "zclip::", op,
                  ": rule: expected one of math/rules.h, or -1 for none, got ", rule,
                  ", which has no compiled code");
  const LossWatch loss_watch(watch, watched, watch_settings, op);
  STD_TORCH_CHECK(has_rule || !loss_watch.has_loss(), "zclip::", op,
                  ": expected a rule where a loss is watched, got none: what it finds is in the "
                  "verdict of the rule");
  Measured results = {};
  bool blocked = found_inf;
  const double* coefs = nullptr;
  if (has_rule) {
    const RuleCall call(*row, state, count, std::move(rule_settings), loss, op);
    results = make_results(list);
    std::vector<GradStats> rows = known ? rows_in(*known, count, op) : measure(list);
    const FloatMode mode;
    if (grad_scale != 1.0) {
      for (GradStats& stats : rows) stats.sumsq /= grad_scale * grad_scale;
    }
    auto* verdict = static_cast<float*>(results.verdict.mutable_data_ptr());
    auto* chosen = static_cast<double*>(results.coefs.mutable_data_ptr());
    call.apply(rows.data(), count, chosen, verdict);
    loss_watch.judge(verdict);
    fill_measured(results, rows, reported_norm(total_of(rows.data(), count), call.nonfinite()));
    blocked |= verdict[kBlocked] != 0.0f;
    blocked |= skip_nonfinite && (static_cast<int>(verdict[kFlags]) & (kHasNan | kHasInf)) != 0;
    coefs = chosen;
  } else {
    const Tensor none = empty_on_cpu({0}, ScalarType::Float);
    results = {none, none, none, none};
  }
  const int64_t rows = held->telemetry() ? count : 0;
  const Tensor found = empty_on_cpu({rows, kNumTelemetry}, ScalarType::Double);
  const Tensor summary = empty_on_cpu({kNumSummary}, ScalarType::Float);
  auto* telemetry = static_cast<double*>(found.mutable_data_ptr());
  auto* columns = static_cast<float*>(summary.mutable_data_ptr());
  if (blocked) {
    report_skipped(rows, telemetry, columns);
  } else {
    held->update(list, {coefs, grad_scale, nullptr, settings.data(), static_cast<uint64_t>(seed)},
                 telemetry, columns);
  }
  return {results.norm, results.stats, results.coefs, results.verdict, found, summary};
}

}  // namespace zclip::cpu
