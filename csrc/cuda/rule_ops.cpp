// CUDA backend of the clip rules and of watch_loss_: settings and checks. The arithmetic is in
// math/, the launches are in rule_op.cpp.

#include <torch/headeronly/util/Exception.h>

#include "rule_op.h"

namespace zclip::cuda {
namespace {

using Access = DeviceList::Access;

// A state of size 0 counts nothing.
Rule global_norm_for(const Tensor& state, const Place& place, double max_norm, int64_t nonfinite,
                     const char* op) {
  Rule rule = {};
  rule.kind = Rule::Kind::kGlobalNorm;
  rule.state = state.numel() == 0 ? nullptr : state_of(state, kNumCounters, place, op);
  rule.global_norm = {max_norm, static_cast<NonFinite>(nonfinite)};
  return rule;
}

Rule zclip_for(const Tensor& state, const Place& place, const ZClipSettings& settings,
               const char* op) {
  Rule rule = {};
  rule.kind = Rule::Kind::kZClip;
  rule.state = state_of(state, kBufferColumn + warmup_length(settings.warmup_steps), place, op);
  rule.zclip = settings;
  return rule;
}

Rule adagc_for(const Tensor& state, const Place& place, int64_t count,
               const AdaGcSettings& settings, const char* op) {
  Rule rule = {};
  rule.kind = Rule::Kind::kAdaGc;
  rule.state = state_of(state, kGammaColumn + count, place, op);
  rule.adagc = settings;
  return rule;
}

Rule spike_skip_for(const Tensor& state, const Place& place, const Tensor& loss,
                    const SpikeSkipSettings& settings, const char* op) {
  STD_TORCH_CHECK(settings.window >= 1, "zclip::", op, ": window must be at least 1, got ",
                  settings.window);
  Rule rule = {};
  rule.kind = Rule::Kind::kSpikeSkip;
  rule.state = state_of(state, kWindowColumn + 2 * settings.window, place, op);
  rule.spike_skip = settings;
  rule.loss = loss_of(loss, place, op);
  return rule;
}

Rule auto_clip_for(const Tensor& state, const Place& place, double percentile, int64_t history,
                   int64_t on_nonfinite, const char* op) {
  STD_TORCH_CHECK(history >= 1 && percentile >= 0.0 && percentile <= 100.0, "zclip::", op,
                  ": wanted a history of at least 1 and a percentile from 0 to 100, got ", history,
                  " and ", percentile);
  Rule rule = {};
  rule.kind = Rule::Kind::kAutoClip;
  rule.state = state_of(state, kHistoryColumn + history, place, op);
  rule.auto_clip = {percentile, history, static_cast<OnNonFinite>(on_nonfinite)};
  return rule;
}

}  // namespace

Judged global_norm_(Tensor state, Tensor stats, double max_norm, int64_t nonfinite) {
  const char* op = "global_norm_";
  const Place place(stats);
  return judge(stats, place, op, global_norm_for(state, place, max_norm, nonfinite, op));
}

Clipped clip_by_global_norm_(std::vector<Tensor> grads, Tensor state, double max_norm,
                             int64_t nonfinite) {
  const char* op = "clip_by_global_norm_";
  const Place place(first_of(grads, state));
  DeviceList list(grads, place, Access::kWrite, op, "grads");
  return clip_by(list, state, place, op, global_norm_for(state, place, max_norm, nonfinite, op),
                 static_cast<NonFinite>(nonfinite));
}

Judged zclip_(Tensor state, Tensor stats, double alpha, double z_thresh, double max_grad_norm,
              double eps, int64_t warmup_steps, int64_t mode, double clip_factor,
              bool skip_update_on_spike, bool skip_step_on_spike, int64_t on_nonfinite) {
  const char* op = "zclip_";
  const Place place(stats);
  const ZClipSettings settings =
      zclip_settings(alpha, z_thresh, max_grad_norm, eps, warmup_steps, mode, clip_factor,
                     skip_update_on_spike, skip_step_on_spike, on_nonfinite);
  return judge(stats, place, op, zclip_for(state, place, settings, op));
}

Clipped clip_by_zclip_(std::vector<Tensor> grads, Tensor state, double alpha, double z_thresh,
                       double max_grad_norm, double eps, int64_t warmup_steps, int64_t mode,
                       double clip_factor, bool skip_update_on_spike, bool skip_step_on_spike,
                       int64_t on_nonfinite) {
  const char* op = "clip_by_zclip_";
  const Place place(first_of(grads, state));
  const ZClipSettings settings =
      zclip_settings(alpha, z_thresh, max_grad_norm, eps, warmup_steps, mode, clip_factor,
                     skip_update_on_spike, skip_step_on_spike, on_nonfinite);
  DeviceList list(grads, place, Access::kWrite, op, "grads");
  return clip_by(list, state, place, op, zclip_for(state, place, settings, op));
}

Judged adagc_(Tensor state, Tensor stats, double lambda_rel, double beta, double lambda_abs,
              double eps, int64_t warmup_steps, int64_t seed, int64_t on_nonfinite) {
  const char* op = "adagc_";
  const Place place(stats);
  const AdaGcSettings settings =
      adagc_settings(lambda_rel, beta, lambda_abs, eps, warmup_steps, seed, on_nonfinite);
  const int64_t count = stats.dim() > 0 ? stats.size(0) : 0;
  return judge(stats, place, op, adagc_for(state, place, count, settings, op));
}

Clipped clip_by_adagc_(std::vector<Tensor> grads, Tensor state, double lambda_rel, double beta,
                       double lambda_abs, double eps, int64_t warmup_steps, int64_t seed,
                       int64_t on_nonfinite) {
  const char* op = "clip_by_adagc_";
  const Place place(first_of(grads, state));
  const AdaGcSettings settings =
      adagc_settings(lambda_rel, beta, lambda_abs, eps, warmup_steps, seed, on_nonfinite);
  DeviceList list(grads, place, Access::kWrite, op, "grads");
  return clip_by(list, state, place, op, adagc_for(state, place, list.count(), settings, op));
}

Judged spike_skip_(Tensor state, Tensor stats, Tensor loss, int64_t window, double sigma,
                   int64_t min_count, int64_t on_nonfinite) {
  const char* op = "spike_skip_";
  const Place place(stats);
  const SpikeSkipSettings settings = {window, sigma, min_count,
                                      static_cast<OnNonFinite>(on_nonfinite)};
  return judge(stats, place, op, spike_skip_for(state, place, loss, settings, op));
}

Clipped clip_by_spike_skip_(std::vector<Tensor> grads, Tensor state, Tensor loss, int64_t window,
                            double sigma, int64_t min_count, int64_t on_nonfinite) {
  const char* op = "clip_by_spike_skip_";
  const Place place(first_of(grads, state));
  const SpikeSkipSettings settings = {window, sigma, min_count,
                                      static_cast<OnNonFinite>(on_nonfinite)};
  DeviceList list(grads, place, Access::kWrite, op, "grads");
  return clip_by(list, state, place, op, spike_skip_for(state, place, loss, settings, op));
}

Judged auto_clip_(Tensor state, Tensor stats, double percentile, int64_t history,
                  int64_t on_nonfinite) {
  const char* op = "auto_clip_";
  const Place place(stats);
  return judge(stats, place, op,
               auto_clip_for(state, place, percentile, history, on_nonfinite, op));
}

Clipped clip_by_auto_clip_(std::vector<Tensor> grads, Tensor state, double percentile,
                           int64_t history, int64_t on_nonfinite) {
  const char* op = "clip_by_auto_clip_";
  const Place place(first_of(grads, state));
  DeviceList list(grads, place, Access::kWrite, op, "grads");
  return clip_by(list, state, place, op,
                 auto_clip_for(state, place, percentile, history, on_nonfinite, op));
}

void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps) {
  const char* op = "watch_loss_";
  const Place place(state);
  double* columns = state_of(state, kNumLossState, place, op);
  STD_TORCH_CHECK(place.holds(verdict) &&
                      verdict.scalar_type() == torch::headeronly::ScalarType::Float &&
                      verdict.is_contiguous() && verdict.numel() == kNumVerdict,
                  "zclip::watch_loss_: verdict must be a contiguous float32 tensor of ",
                  kNumVerdict, " elements on ", place.name(), ", got ", verdict.numel());
  const DeviceNumber number = loss_of(loss, place, op);
  if (number.address == nullptr) return;
  check_launch(launch_watch_loss(number, {factor, rising_steps, decay, warmup_steps}, columns,
                                 static_cast<float*>(verdict.mutable_data_ptr()), place.queue()),
               op);
}

}  // namespace zclip::cuda
