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
Clipped agc_(std::vector<Tensor> grads, std::vector<Tensor> params, Tensor state, double clip,
             double eps, int64_t on_nonfinite);
void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps);

}  // namespace zclip::cuda
