// The CUDA backend's operators, as register_ops.h registers them. Schemas live in zclip/schemas.
// copy_and_hash_ and read_probe are missing: they are about host memory.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace zclip::cuda {

using torch::stable::Tensor;

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

// Any clip rule: see math/rules.h.
Judged rule_(Tensor state, Tensor stats, int64_t rule, std::vector<double> settings,
             std::optional<Tensor> loss);
Clipped clip_by_(std::vector<Tensor> grads, Tensor state, int64_t rule,
                 std::vector<double> settings, std::optional<Tensor> loss);
Clipped decide_by_(std::vector<Tensor> grads, Tensor state, int64_t rule,
                   std::vector<double> settings, std::optional<Tensor> loss);
Clipped agc_(std::vector<Tensor> grads, std::vector<Tensor> params, Tensor state, double clip,
             double eps, int64_t on_nonfinite);
void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps);

// Rows of telemetry, and summary.
using Updated = std::tuple<Tensor, Tensor>;
Updated optim_update_(std::vector<Tensor> params, std::vector<Tensor> grads,
                      std::vector<Tensor> firsts, std::vector<Tensor> seconds,
                      std::vector<Tensor> maxima, std::vector<Tensor> steps, Tensor ledger,
                      Tensor coefs, Tensor blocked, Tensor grad_scale, Tensor rates,
                      int64_t algorithm, std::vector<int64_t> sizes, std::vector<double> settings,
                      int64_t seed, bool telemetry, int64_t skip_flags);

}  // namespace zclip::cuda
