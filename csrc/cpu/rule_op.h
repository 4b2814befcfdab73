// What the operators of clip rules have in common: checks of their arguments and room for results.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <vector>

#include "../math/totals.h"
#include "float_mode.h"
#include "ops.h"

namespace zclip::cpu {

using torch::headeronly::ScalarType;

// Returns the columns of a rule's state. Raises if it is not float64, contiguous and of that size.
double* state_of(const Tensor& state, int64_t size, const char* op);

// Returns the one element of a loss, or none if the tensor is empty. Raises for other shapes.
struct Loss {
  bool given;
  double value;
};
Loss loss_of(const Tensor& loss, const char* op);

// A new tensor of one or two dimensions, or of none.
Tensor empty_on_cpu(std::initializer_list<int64_t> sizes, ScalarType type);

// Measured gradients and room for what is said about them.
struct Measured {
  Tensor norm;
  Tensor stats;
  Tensor coefs;
  Tensor verdict;
};
Measured make_results(const TensorList& grads);
void fill_measured(const Measured& results, const std::vector<GradStats>& rows, double norm);

}  // namespace zclip::cpu
