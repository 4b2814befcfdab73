// CPU backend of zclip::agc_: rows of gradients and of weights are measured in parallel, then the
// rows that are too large are scaled.

#include "../math/agc.h"

#include "chunk_stats.h"
#include "cpu_path.h"
#include "for_each_chunk.h"
#include "rule_op.h"

namespace zclip::cpu {
namespace {

// Stats of every row; a row longer than a chunk is several chunks, added in order.
std::vector<GradStats> measure_rows(const TensorList& list) {
  const bool avx2 = use_avx2();
  std::vector<GradStats> slots(list.chunks().size());
  for_each_chunk(list, [&](int64_t c, const Chunk& chunk) {
    slots[c] = visit_chunk(list.spans()[chunk.tensor], chunk, TensorList::Access::kRead,
                           [&](auto* data) { return chunk_stats(data, chunk.len, avx2); });
  });
  std::vector<GradStats> rows(list.num_rows());
  for (size_t c = 0; c < slots.size(); ++c) merge(rows[list.chunks()[c].row], slots[c]);
  return rows;
}

void check_same_shapes(const std::vector<Tensor>& grads, const std::vector<Tensor>& params) {
  STD_TORCH_CHECK(grads.size() == params.size(),
                  "zclip::agc_: expected one parameter per gradient (", grads.size(), "), got ",
                  params.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto have = params[i].sizes(), want = grads[i].sizes();
    STD_TORCH_CHECK(
        have.size() == want.size() && std::equal(have.begin(), have.end(), want.begin()),
        "zclip::agc_: params[", i, "]: expected the shape of grads[", i, "], got another");
  }
}

}  // namespace

Clipped agc_(const std::vector<Tensor>& grads, const std::vector<Tensor>& params, Tensor state,
             double clip, double eps, int64_t on_nonfinite) {
  using Access = TensorList::Access;
  check_same_shapes(grads, params);
  const TensorList list(grads, Access::kWrite, "agc_", "grads", TensorList::Cut::kRows);
  const TensorList weights(params, Access::kRead, "agc_", "params", TensorList::Cut::kRows);
  double* counters = state_of(state, kNumCounters, "agc_");
  const Measured results = make_results(list);
  const std::vector<GradStats> grad_rows = measure_rows(list);
  const std::vector<GradStats> weight_rows = measure_rows(weights);

  const FloatMode mode;
  const size_t count = list.spans().size();
  std::vector<GradStats> stats(count);
  for (size_t t = 0; t < count; ++t) {
    const Span& span = list.spans()[t];
    for (int64_t r = span.first_row; r < span.first_row + span.rows; ++r) {
      merge(stats[t], grad_rows[r]);
    }
  }
  const Health health = health_of(total_of(stats.data(), static_cast<int64_t>(count)));
  const bool refuse = refused(health, static_cast<OnNonFinite>(on_nonfinite));

  auto* least = static_cast<double*>(results.coefs.mutable_data_ptr());
  std::vector<double> row_coefs(list.num_rows());
  Report report = {};
  report.blocked = refuse;
  double clipped_sumsq = 0.0;
  for (size_t t = 0; t < count; ++t) {
    const Span& span = list.spans()[t];
    least[t] = refuse ? kRefuse : kKeep;
    for (int64_t r = span.first_row; r < span.first_row + span.rows; ++r) {
      const double norm = norm_of(grad_rows[r]);
      // The weights' NaN and Inf do not count: this rule judges gradients.
      const double coef = refuse ? kRefuse : agc_row(norm, sqrt(weight_rows[r].sumsq), clip, eps);
      row_coefs[r] = coef;
      least[t] = lesser_coef(coef, least[t]);
      clipped_sumsq += norm * coef * (norm * coef);
    }
    report.clipped |= !refuse && !(least[t] >= 1.0);
  }
  report.clipped_norm = refuse ? 0.0 : sqrt(clipped_sumsq);
  write_report(health, report, counters, static_cast<float*>(results.verdict.mutable_data_ptr()));
  fill_measured(results, stats, health.norm);
  scale_rows(list, row_coefs.data());
  return {results.norm, results.stats, results.coefs, results.verdict};
}

}  // namespace zclip::cpu
