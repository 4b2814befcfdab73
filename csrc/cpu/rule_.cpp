// CPU backend of zclip::rule_ and zclip::clip_by_: any rule of math/rules.h, from stats to
// coefficients, and with measuring and scaling in one crossing from Python. Handing over a list of
// tensors costs more than measuring small ones.

#include "../reference_rule.h"
#include "loss_watch.h"
#include "reading.h"
#include "rule_call.h"

namespace zclip::cpu {
Judged rule_(Tensor state, Tensor stats, int64_t rule, std::vector<double> settings,
             std::optional<Tensor> loss) {
  const RuleRow* row = find_rule(rule);
  if (row == nullptr) return reference_rule(state, stats, rule, settings, loss);
  STD_TORCH_CHECK(stats.scalar_type() == ScalarType::Double && stats.is_contiguous() &&
                      stats.dim() == 2 && stats.size(1) == kNumStats,
                  "zclip::rule_: stats: expected a contiguous float64 tensor of shape [N, ",
                  kNumStats, "], got ", stats.numel(), " elements");
  const int64_t count = stats.size(0);
  const RuleCall call(*row, state, count, std::move(settings), loss, "rule_");
  Tensor coefs = torch::stable::new_empty(stats, {count}, ScalarType::Double);
  Tensor verdict = torch::stable::new_empty(stats, {kNumVerdict}, ScalarType::Float);
  const FloatMode mode;
  call.apply(static_cast<const GradStats*>(stats.const_data_ptr()), count,
             static_cast<double*>(coefs.mutable_data_ptr()),
             static_cast<float*>(verdict.mutable_data_ptr()));
  return {coefs, verdict};
}

namespace {

// Measures and applies the rule, its arguments checked; where there is no code of it, its reference
// answers. Notes what becomes of NaN and Inf in the gradients.
Clipped decide(const TensorList& list, const Tensor& state, int64_t rule,
               std::vector<double> settings, const std::optional<Tensor>& loss, const char* op,
               NonFinite* nonfinite) {
  const auto count = static_cast<int64_t>(list.spans().size());
  const RuleRow* row = find_rule(rule);
  const std::optional<RuleCall> call =
      row == nullptr ? std::nullopt
                     : std::make_optional<RuleCall>(*row, state, count, settings, loss, op);
  *nonfinite = call ? call->nonfinite() : NonFinite::kPropagate;
  const Measured results = make_results(list);
  const std::vector<GradStats> rows = measure(list);
  {
    const FloatMode mode;
    if (call) {
      call->apply(rows.data(), count, static_cast<double*>(results.coefs.mutable_data_ptr()),
                  static_cast<float*>(results.verdict.mutable_data_ptr()));
    }
    fill_measured(results, rows, reported_norm(total_of(rows.data(), count), *nonfinite));
  }
  if (call) return {results.norm, results.stats, results.coefs, results.verdict};
  const auto [coefs, verdict] = reference_rule(state, results.stats, rule, settings, loss);
  return {results.norm, results.stats, coefs, verdict};
}

}  // namespace

Clipped decide_by_(const std::vector<Tensor>& grads, Tensor state, int64_t rule,
                   std::vector<double> settings, std::optional<Tensor> loss) {
  const TensorList list(grads, TensorList::Access::kRead, "decide_by_", "grads");
  NonFinite nonfinite;
  return decide(list, state, rule, std::move(settings), loss, "decide_by_", &nonfinite);
}

namespace {

// Does to the gradients what was decided.
void apply(const TensorList& list, const Clipped& decided, NonFinite nonfinite) {
  const auto& [norm, stats, coefs, verdict] = decided;
  if (nonfinite == NonFinite::kZero) {
    zero_nonfinite_spans(list, static_cast<const GradStats*>(stats.const_data_ptr()));
  }
  scale_rows(list, static_cast<const double*>(coefs.const_data_ptr()));
}

}  // namespace

Clipped clip_by_(const std::vector<Tensor>& grads, Tensor state, int64_t rule,
                 std::vector<double> settings, std::optional<Tensor> loss) {
  const TensorList list(grads, TensorList::Access::kWrite, "clip_by_", "grads");
  NonFinite nonfinite;
  Clipped decided = decide(list, state, rule, std::move(settings), loss, "clip_by_", &nonfinite);
  apply(list, decided, nonfinite);
  return decided;
}

Clipped clip_read_(int64_t reading, Tensor state, int64_t rule, std::vector<double> settings,
                   std::optional<Tensor> loss, std::optional<Tensor> watch,
                   std::optional<Tensor> watched, std::vector<double> watch_settings) {
  const char* op = "clip_read_";
  const std::shared_ptr<const TensorList> list = take_reading(reading, op);
  const LossWatch loss_watch(watch, watched, watch_settings, op);
  NonFinite nonfinite;
  Clipped decided = decide(*list, state, rule, std::move(settings), loss, op, &nonfinite);
  apply(*list, decided, nonfinite);
  const FloatMode mode;
  loss_watch.judge(static_cast<float*>(std::get<3>(decided).mutable_data_ptr()));
  return decided;
}

}  // namespace zclip::cpu
