// CPU backend of zclip::spike_skip_ and zclip::clip_by_spike_skip_. The arithmetic is in math/.

#include "../math/spike_skip.h"

#include "rule_op.h"

namespace zclip::cpu {
namespace {

auto spike_skip_for(const Tensor& state, const Tensor& loss, const SpikeSkipSettings& settings,
                    const char* op) {
  STD_TORCH_CHECK(settings.window >= 1, "zclip::", op, ": window must be at least 1, got ",
                  settings.window);
  double* columns = state_of(state, kWindowColumn + 2 * settings.window, op);
  const Loss given = loss_of(loss, op);
  return same_for_all([=](const Totals& total, float* verdict) {
    return spike_skip_rule(total, given.given ? &given.value : nullptr, settings, columns, verdict);
  });
}

}  // namespace

Judged spike_skip_(Tensor state, Tensor stats, Tensor loss, int64_t window, double sigma,
                   int64_t min_count, int64_t on_nonfinite) {
  const char* op = "spike_skip_";
  const SpikeSkipSettings settings = {window, sigma, min_count,
                                      static_cast<OnNonFinite>(on_nonfinite)};
  return judge(stats, op, spike_skip_for(state, loss, settings, op));
}

Clipped clip_by_spike_skip_(std::vector<Tensor> grads, Tensor state, Tensor loss, int64_t window,
                            double sigma, int64_t min_count, int64_t on_nonfinite) {
  const char* op = "clip_by_spike_skip_";
  const SpikeSkipSettings settings = {window, sigma, min_count,
                                      static_cast<OnNonFinite>(on_nonfinite)};
  const TensorList list(grads, TensorList::Access::kWrite, op, "grads");
  return clip_by(list, spike_skip_for(state, loss, settings, op));
}

}  // namespace zclip::cpu
