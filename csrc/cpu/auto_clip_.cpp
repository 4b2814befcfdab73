// CPU backend of zclip::auto_clip_ and zclip::clip_by_auto_clip_. The arithmetic is in math/.

#include "../math/auto_clip.h"

#include "rule_op.h"

namespace zclip::cpu {
namespace {

auto auto_clip_for(const Tensor& state, double percentile, int64_t history, int64_t on_nonfinite,
                   const char* op) {
  STD_TORCH_CHECK(history >= 1 && percentile >= 0.0 && percentile <= 100.0, "zclip::", op,
                  ": wanted a history of at least 1 and a percentile from 0 to 100, got ", history,
                  " and ", percentile);
  double* columns = state_of(state, kHistoryColumn + history, op);
  return same_for_all([=](const Totals& total, float* verdict) {
    return auto_clip_rule(total, percentile, history, static_cast<OnNonFinite>(on_nonfinite),
                          columns, verdict);
  });
}

}  // namespace

Judged auto_clip_(Tensor state, Tensor stats, double percentile, int64_t history,
                  int64_t on_nonfinite) {
  const char* op = "auto_clip_";
  return judge(stats, op, auto_clip_for(state, percentile, history, on_nonfinite, op));
}

Clipped clip_by_auto_clip_(std::vector<Tensor> grads, Tensor state, double percentile,
                           int64_t history, int64_t on_nonfinite) {
  const char* op = "clip_by_auto_clip_";
  const TensorList list(grads, TensorList::Access::kWrite, op, "grads");
  return clip_by(list, auto_clip_for(state, percentile, history, on_nonfinite, op));
}

}  // namespace zclip::cpu
