// A clip rule, applied by one block. The arithmetic is in math/ and runs in the order it has on the
// CPU, so that coefficients have the same bits for the same stats.

#pragma once

#include "block_join.cuh"
#include "percentile.cuh"
#include "rule.h"

namespace zclip::cuda {

__device__ __forceinline__ double read_number(const DeviceNumber& number) {
  switch (number.format) {
    case Format::kFloat32:
      return *static_cast<const float*>(number.address);
    case Format::kBfloat16:
      return widen(*static_cast<const Bfloat16*>(number.address));
    case Format::kFloat16:
      return widen(*static_cast<const Float16*>(number.address));
    default:
      return *static_cast<const double*>(number.address);
  }
}

__device__ __forceinline__ void write_norm(const Judgement& out, double norm) {
  if (out.norm == nullptr) return;
  if (out.norm_is_double) {
    *static_cast<double*>(out.norm) = norm;
  } else {
    *static_cast<float*>(out.norm) = static_cast<float>(norm);
  }
}

// The coefficient of a rule that has one and no form for whole blocks.
template <typename AnyRule>
__device__ __forceinline__ double coef_by(const Rule& rule, const Totals& total, const double* loss,
                                          float* verdict) {
  if constexpr (AnyRule::kPerTensor || AnyRule::kHasBlockForm) {
    return kKeep;  // never asked
  } else {
    return AnyRule::coef(total, loss, rule.settings, rule.state, verdict);
  }
}

// One coefficient for all gradients; called by one thread. Returns the norm to report as well.
__device__ __forceinline__ double single_coef(const Rule& rule, const Totals& total, float* verdict,
                                              double* norm) {
  const bool given = rule.loss.address != nullptr;
  const double value = given ? read_number(rule.loss) : 0.0;
  const double* loss = given ? &value : nullptr;
  NonFinite nonfinite = NonFinite::kPropagate;
  double coef = kKeep;
  switch (rule.id) {
#define ZCLIP_CASE(number, name, Type)                \
  case RuleId::k##Type:                               \
    nonfinite = Type::nonfinite(rule.settings);       \
    coef = coef_by<Type>(rule, total, loss, verdict); \
    break;
    ZCLIP_RULES(ZCLIP_CASE)
#undef ZCLIP_CASE
  }
  *norm = reported_norm(total, nonfinite);
  return coef;
}

// AdaGC has one coefficient for each tensor: each thread takes every kThreads-th.
__device__ __forceinline__ void apply_adagc(const Rule& rule, const GradStats* rows, int64_t count,
                                            const Judgement& out) {
  ZCLIP_SHARED(AdaGcStep, shared_step, 1);
  const AdaGcSettings settings = AdaGc::settings_of(rule.settings);
  double* gammas = rule.state + kGammaColumn;
  Health health = {};
  double worst_gamma = 0.0;
  if (threadIdx.x == 0) {
    health = health_of(total_of(rows, count));
    shared_step[0] = adagc_begin(health, settings, rule.state);
    if (health.worst >= 0) {
      worst_gamma = adagc_gamma(gammas[health.worst], norm_of(rows[health.worst]));
    }
    write_norm(out, health.norm);
  }
  __syncthreads();  // thread 0 has read the worst gamma, which its owner is about to change
  const AdaGcStep step = shared_step[0];
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    out.coefs[i] = adagc_tensor(step, settings, norm_of(rows[i]), gammas + i);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  double clipped_sumsq = 0.0;
  bool any_clipped = false;
  for (int64_t i = 0; i < count; ++i) {
    const double clipped = norm_of(rows[i]) * out.coefs[i];
    any_clipped |= !(out.coefs[i] >= 1.0);
    clipped_sumsq += clipped * clipped;
  }
  adagc_finish(health, step, settings, any_clipped, clipped_sumsq, worst_gamma, rule.state,
               out.verdict);
}

// AutoClip: thread 0 stores the norm, all count, thread 0 judges.
__device__ __forceinline__ void apply_auto_clip(const Rule& rule, const GradStats* rows,
                                                int64_t count, const Judgement& out) {
  ZCLIP_SHARED(double, coef, 1);
  const AutoClipSettings settings = AutoClip::settings_of(rule.settings);
  AutoClipStep step = {};
  if (threadIdx.x == 0) {
    step =
        auto_clip_begin(total_of(rows, count), settings.history, settings.on_nonfinite, rule.state);
    write_norm(out, step.health.norm);
  }
  __syncthreads();
  const Ring ring = auto_clip_ring(rule.state, settings.history);
  const double threshold = block_percentile(ring.values, filled(ring), settings.percentile);
  if (threadIdx.x == 0) coef[0] = auto_clip_finish(step, threshold, rule.state, out.verdict);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) out.coefs[i] = coef[0];
}

// All threads of the block must call it, and rows must be visible to all of them.
__device__ __forceinline__ void apply_rule(const Rule& rule, const GradStats* rows, int64_t count,
                                           const Judgement& out) {
  if (rule.id == RuleId::kAdaGc) {
    apply_adagc(rule, rows, count, out);
    return;
  }
  if (rule.id == RuleId::kAutoClip) {
    apply_auto_clip(rule, rows, count, out);
    return;
  }
  ZCLIP_SHARED(double, coef, 1);
  if (threadIdx.x == 0) {
    double norm;
    coef[0] = single_coef(rule, total_of(rows, count), out.verdict, &norm);
    write_norm(out, norm);
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) out.coefs[i] = coef[0];
}

// grid: one block. Writes coefs, verdict, state and, if wanted, the norm.
__global__ void __launch_bounds__(kThreads)
    apply_rule_kernel(const Rule rule, const GradStats* rows, int64_t count, const Judgement out) {
  apply_rule(rule, rows, count, out);
}

}  // namespace zclip::cuda
