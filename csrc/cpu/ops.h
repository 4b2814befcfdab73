// The CPU backend's operators, as library.cpp registers them. Schemas live in zclip/schemas.py.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <tuple>
#include <vector>

#include "../math/global_norm.h"
#include "tensor_list.h"

namespace zclip::cpu {

Tensor grad_stats(std::vector<Tensor> grads);
Tensor power_stats(std::vector<Tensor> grads, double p);
std::tuple<Tensor, Tensor> global_norm_(Tensor state, Tensor stats, double max_norm,
                                        int64_t nonfinite);
void scale_(std::vector<Tensor> grads, Tensor coefs);
void zero_nonfinite_(std::vector<Tensor> grads, Tensor stats);
void clamp_(std::vector<Tensor> grads, double limit);
std::tuple<Tensor, Tensor, Tensor, Tensor> clip_by_global_norm_(std::vector<Tensor> grads,
                                                                Tensor state, double max_norm,
                                                                int64_t nonfinite);
Tensor read_probe(std::vector<Tensor> tensors);

// The pieces, on lists already checked, that the fused operators are made of.
std::vector<GradStats> measure(const TensorList& grads);
void scale_spans(const TensorList& grads, const double* coefs);
void zero_nonfinite_spans(const TensorList& grads, const GradStats* rows);

// Returns the counters of a state, or null for a state of size 0. Raises for any other shape.
double* counters_of(const Tensor& state, const char* op);

}  // namespace zclip::cpu
