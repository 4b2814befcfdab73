// The CPU backend's operators, as library.cpp registers them. Schemas live in zclip/schemas.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "tensor_list.h"

namespace zclip::cpu {

// Coefs and verdict.
using Judged = std::tuple<Tensor, Tensor>;
// Norm, stats, coefs and verdict.
using Clipped = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensor grad_stats(std::vector<Tensor> grads);
Tensor power_stats(std::vector<Tensor> grads, double p);
void scale_(std::vector<Tensor> grads, Tensor coefs);
void zero_nonfinite_(std::vector<Tensor> grads, Tensor stats);
void clamp_(std::vector<Tensor> grads, double limit);
Tensor fingerprint(std::vector<Tensor> tensors);
Tensor copy_and_hash_(std::vector<Tensor> targets, std::vector<Tensor> sources);
Tensor read_probe(std::vector<Tensor> tensors);

Judged global_norm_(Tensor state, Tensor stats, double max_norm, int64_t nonfinite);
Clipped clip_by_global_norm_(std::vector<Tensor> grads, Tensor state, double max_norm,
                             int64_t nonfinite);
Judged zclip_(Tensor state, Tensor stats, double alpha, double z_thresh, double max_grad_norm,
              double eps, int64_t warmup_steps, int64_t mode, double clip_factor,
              bool skip_update_on_spike, bool skip_step_on_spike, int64_t on_nonfinite);
Clipped clip_by_zclip_(std::vector<Tensor> grads, Tensor state, double alpha, double z_thresh,
                       double max_grad_norm, double eps, int64_t warmup_steps, int64_t mode,
                       double clip_factor, bool skip_update_on_spike, bool skip_step_on_spike,
                       int64_t on_nonfinite);
Judged adagc_(Tensor state, Tensor stats, double lambda_rel, double beta, double lambda_abs,
              double eps, int64_t warmup_steps, int64_t seed, int64_t on_nonfinite);
Clipped clip_by_adagc_(std::vector<Tensor> grads, Tensor state, double lambda_rel, double beta,
                       double lambda_abs, double eps, int64_t warmup_steps, int64_t seed,
                       int64_t on_nonfinite);
Judged spike_skip_(Tensor state, Tensor stats, Tensor loss, int64_t window, double sigma,
                   int64_t min_count, int64_t on_nonfinite);
Clipped clip_by_spike_skip_(std::vector<Tensor> grads, Tensor state, Tensor loss, int64_t window,
                            double sigma, int64_t min_count, int64_t on_nonfinite);
Judged auto_clip_(Tensor state, Tensor stats, double percentile, int64_t history,
                  int64_t on_nonfinite);
Clipped clip_by_auto_clip_(std::vector<Tensor> grads, Tensor state, double percentile,
                           int64_t history, int64_t on_nonfinite);
Clipped agc_(std::vector<Tensor> grads, std::vector<Tensor> params, Tensor state, double clip,
             double eps, int64_t on_nonfinite);
void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps);

// Telemetry and summary.
using Updated = std::tuple<Tensor, Tensor>;
Updated optim_update_(std::vector<Tensor> params, std::vector<Tensor> grads,
                      std::vector<Tensor> firsts, std::vector<Tensor> seconds,
                      std::vector<Tensor> maxima, std::vector<Tensor> steps, Tensor ledger,
                      Tensor coefs, Tensor blocked, Tensor grad_scale, Tensor rates,
                      int64_t algorithm, std::vector<int64_t> sizes, std::vector<double> settings,
                      int64_t seed, bool telemetry);

// The pieces, on lists already checked, that the fused operators are made of.
std::vector<GradStats> measure(const TensorList& grads);
void scale_rows(const TensorList& grads, const double* coefs);  // one coefficient per row
void zero_nonfinite_spans(const TensorList& grads, const GradStats* rows);

}  // namespace zclip::cpu
