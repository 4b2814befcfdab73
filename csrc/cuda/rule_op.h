// What the operators of clip rules have in common: checks of their arguments and room for results.

#pragma once

#include "device_list.h"
#include "ops.h"
#include "rule.h"

namespace zclip::cuda {

// Returns the columns of a rule's state. Raises if it is not float64, contiguous and of that size.
double* state_of(const Tensor& state, int64_t size, const Place& place, const char* op);

// Returns the address of a loss, null if the tensor is empty. Raises for other shapes.
DeviceNumber loss_of(const Tensor& loss, const Place& place, const char* op);

// Room for what is said about a list of gradients.
struct Results {
  Tensor norm;
  Tensor stats;
  Tensor coefs;
  Tensor verdict;

  Judgement judgement() const;
  GradStats* rows() const { return static_cast<GradStats*>(stats.mutable_data_ptr()); }
  Clipped clipped() const { return {norm, stats, coefs, verdict}; }
};
Results make_results(const DeviceList& grads, const Tensor& like);

}  // namespace zclip::cuda
