// CPU backend of zclip::zclip_ and zclip::clip_by_zclip_. The arithmetic is in math/.

#include "../math/zclip.h"

#include "rule_op.h"

namespace zclip::cpu {
namespace {

auto zclip_for(const Tensor& state, const ZClipSettings& settings, const char* op) {
  double* columns = state_of(state, kBufferColumn + warmup_length(settings.warmup_steps), op);
  return same_for_all([=](const Totals& total, float* verdict) {
    return zclip_rule(total, settings, columns, verdict);
  });
}

}  // namespace

Judged zclip_(Tensor state, Tensor stats, double alpha, double z_thresh, double max_grad_norm,
              double eps, int64_t warmup_steps, int64_t mode, double clip_factor,
              bool skip_update_on_spike, bool skip_step_on_spike, int64_t on_nonfinite) {
  const char* op = "zclip_";
  const ZClipSettings settings =
      zclip_settings(alpha, z_thresh, max_grad_norm, eps, warmup_steps, mode, clip_factor,
                     skip_update_on_spike, skip_step_on_spike, on_nonfinite);
  return judge(stats, op, zclip_for(state, settings, op));
}

Clipped clip_by_zclip_(std::vector<Tensor> grads, Tensor state, double alpha, double z_thresh,
                       double max_grad_norm, double eps, int64_t warmup_steps, int64_t mode,
                       double clip_factor, bool skip_update_on_spike, bool skip_step_on_spike,
                       int64_t on_nonfinite) {
  const char* op = "clip_by_zclip_";
  const ZClipSettings settings =
      zclip_settings(alpha, z_thresh, max_grad_norm, eps, warmup_steps, mode, clip_factor,
                     skip_update_on_spike, skip_step_on_spike, on_nonfinite);
  const TensorList list(grads, TensorList::Access::kWrite, op, "grads");
  return clip_by(list, zclip_for(state, settings, op));
}

}  // namespace zclip::cpu
