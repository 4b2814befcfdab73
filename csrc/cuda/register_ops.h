// The one list of what the CUDA backend implements, for library.cpp and for the tests.

#pragma once

#include <torch/csrc/stable/library.h>

#include "ops.h"

namespace zclip::cuda {

template <typename Library>
void register_ops(Library& m) {
  m.impl("grad_stats", TORCH_BOX(&grad_stats));
  m.impl("power_stats", TORCH_BOX(&power_stats));
  m.impl("scale_", TORCH_BOX(&scale_));
  m.impl("zero_nonfinite_", TORCH_BOX(&zero_nonfinite_));
  m.impl("clamp_", TORCH_BOX(&clamp_));
  m.impl("fingerprint", TORCH_BOX(&fingerprint));
  m.impl("rule_", TORCH_BOX(&rule_));
  m.impl("clip_by_", TORCH_BOX(&clip_by_));
  m.impl("agc_", TORCH_BOX(&agc_));
  m.impl("watch_loss_", TORCH_BOX(&watch_loss_));
  m.impl("decide_by_", TORCH_BOX(&decide_by_));
  m.impl("optim_update_", TORCH_BOX(&optim_update_));
}

}  // namespace zclip::cuda
