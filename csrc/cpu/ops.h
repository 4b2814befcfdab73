// The CPU backend's operators, as library.cpp registers them. Schemas live in zclip/schemas.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "tensor_list.h"

namespace zclip::cpu {

// Coefs and verdict.
using Judged = std::tuple<Tensor, Tensor>;
// Norm, stats, coefs and verdict.
using Clipped = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Lists come by reference, because the caller has unpacked them anyway: to copy one of thousands of
// tensors takes as long as to measure small ones.
Tensor grad_stats(const std::vector<Tensor>& grads);
Tensor power_stats(const std::vector<Tensor>& grads, double p);
void scale_(const std::vector<Tensor>& grads, Tensor coefs);
void zero_nonfinite_(const std::vector<Tensor>& grads, Tensor stats);
void clamp_(const std::vector<Tensor>& grads, double limit);
Tensor fingerprint(std::vector<Tensor> tensors);
Tensor copy_and_hash_(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources);
Tensor read_probe(const std::vector<Tensor>& tensors);

// Any clip rule: see math/rules.h.
Judged rule_(Tensor state, Tensor stats, int64_t rule, std::vector<double> settings,
             std::optional<Tensor> loss);
Clipped clip_by_(const std::vector<Tensor>& grads, Tensor state, int64_t rule,
                 std::vector<double> settings, std::optional<Tensor> loss);
Clipped decide_by_(const std::vector<Tensor>& grads, Tensor state, int64_t rule,
                   std::vector<double> settings, std::optional<Tensor> loss);
// clip_by_ on what a reader has read, then watch_loss_ on the verdict if there is a watch.
Clipped clip_read_(int64_t reading, Tensor state, int64_t rule, std::vector<double> settings,
                   std::optional<Tensor> loss, std::optional<Tensor> watch,
                   std::optional<Tensor> watched, std::vector<double> watch_settings);
Clipped agc_(const std::vector<Tensor>& grads, const std::vector<Tensor>& params, Tensor state,
             double clip, double eps, int64_t on_nonfinite);
void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps);

// Telemetry and summary.
using Updated = std::tuple<Tensor, Tensor>;
Updated optim_update_(std::vector<Tensor> params, std::vector<Tensor> grads,
                      std::vector<Tensor> firsts, std::vector<Tensor> seconds,
                      std::vector<Tensor> maxima, std::vector<Tensor> steps, Tensor ledger,
                      Tensor coefs, Tensor blocked, Tensor grad_scale, Tensor rates,
                      int64_t algorithm, std::vector<int64_t> sizes, std::vector<double> settings,
                      int64_t seed, bool telemetry, int64_t skip_flags);

// A parameter list with its state, kept natively under a number until it is dropped.
int64_t make_plan(std::vector<Tensor> params, std::vector<Tensor> firsts,
                  std::vector<Tensor> seconds, std::vector<Tensor> maxima,
                  std::vector<Tensor> steps, Tensor ledger, int64_t algorithm,
                  std::vector<int64_t> sizes, bool telemetry);
void drop_plan(int64_t plan);
// Norm, stats, coefs, verdict, rows and summary; an empty summary says that the plan is stale.
// Where stats are known, the gradients are not measured. With a watch, the loss is judged as
// watch_loss_ does, by {factor, rising_steps, decay, warmup_steps}, before the step is decided on.
using Stepped = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
Stepped fused_step_(int64_t reading, int64_t plan, Tensor state, int64_t rule,
                    std::vector<double> rule_settings, std::optional<Tensor> loss,
                    std::vector<double> settings, double grad_scale, bool found_inf,
                    bool skip_nonfinite, int64_t seed, std::optional<Tensor> known,
                    std::optional<Tensor> watch, std::optional<Tensor> watched,
                    std::vector<double> watch_settings);
void check_settings(const std::vector<double>& settings, int64_t groups, const char* op);

// The pieces, on lists already checked, that the fused operators are made of.
std::vector<GradStats> measure(const TensorList& grads);
void scale_rows(const TensorList& grads, const double* coefs);  // one coefficient per row
void zero_nonfinite_spans(const TensorList& grads, const GradStats* rows);

}  // namespace zclip::cpu
