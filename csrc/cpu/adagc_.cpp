// CPU backend of zclip::adagc_ and zclip::clip_by_adagc_. The arithmetic is in math/.

#include "../math/adagc.h"

#include "rule_op.h"

namespace zclip::cpu {
namespace {

auto adagc_for(const Tensor& state, int64_t count, const AdaGcSettings& settings, const char* op) {
  double* columns = state_of(state, kGammaColumn + count, op);
  return [=](const GradStats* rows, int64_t num_rows, double* coefs, float* verdict) {
    adagc_rule(rows, num_rows, settings, columns, coefs, verdict);
  };
}

}  // namespace

Judged adagc_(Tensor state, Tensor stats, double lambda_rel, double beta, double lambda_abs,
              double eps, int64_t warmup_steps, int64_t seed, int64_t on_nonfinite) {
  const char* op = "adagc_";
  const AdaGcSettings settings =
      adagc_settings(lambda_rel, beta, lambda_abs, eps, warmup_steps, seed, on_nonfinite);
  const int64_t count = stats.dim() > 0 ? stats.size(0) : 0;
  return judge(stats, op, adagc_for(state, count, settings, op));
}

Clipped clip_by_adagc_(std::vector<Tensor> grads, Tensor state, double lambda_rel, double beta,
                       double lambda_abs, double eps, int64_t warmup_steps, int64_t seed,
                       int64_t on_nonfinite) {
  const char* op = "clip_by_adagc_";
  const AdaGcSettings settings =
      adagc_settings(lambda_rel, beta, lambda_abs, eps, warmup_steps, seed, on_nonfinite);
  const TensorList list(grads, TensorList::Access::kWrite, op, "grads");
  return clip_by(list, adagc_for(state, static_cast<int64_t>(grads.size()), settings, op));
}

}  // namespace zclip::cpu
