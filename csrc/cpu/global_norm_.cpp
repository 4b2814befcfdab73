// CPU backend of zclip::global_norm_ and zclip::clip_by_global_norm_. The arithmetic is in math/.

#include "../math/global_norm.h"

#include "rule_op.h"

namespace zclip::cpu {
namespace {

// A state of size 0 counts nothing.
auto global_norm_for(const Tensor& state, double max_norm, NonFinite mode, const char* op) {
  double* counters = state.numel() == 0 ? nullptr : state_of(state, kNumCounters, op);
  return same_for_all([=](const Totals& total, float* verdict) {
    return global_norm_rule(total, max_norm, mode, counters, verdict);
  });
}

}  // namespace

Judged global_norm_(Tensor state, Tensor stats, double max_norm, int64_t nonfinite) {
  const char* op = "global_norm_";
  return judge(stats, op, global_norm_for(state, max_norm, static_cast<NonFinite>(nonfinite), op));
}

Clipped clip_by_global_norm_(std::vector<Tensor> grads, Tensor state, double max_norm,
                             int64_t nonfinite) {
  const char* op = "clip_by_global_norm_";
  const auto mode = static_cast<NonFinite>(nonfinite);
  const TensorList list(grads, TensorList::Access::kWrite, op, "grads");
  return clip_by(list, global_norm_for(state, max_norm, mode, op), mode);
}

}  // namespace zclip::cpu
