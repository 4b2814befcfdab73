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
  m.impl("global_norm_", TORCH_BOX(&global_norm_));
  m.impl("clip_by_global_norm_", TORCH_BOX(&clip_by_global_norm_));
  m.impl("zclip_", TORCH_BOX(&zclip_));
  m.impl("clip_by_zclip_", TORCH_BOX(&clip_by_zclip_));
  m.impl("adagc_", TORCH_BOX(&adagc_));
  m.impl("clip_by_adagc_", TORCH_BOX(&clip_by_adagc_));
  m.impl("spike_skip_", TORCH_BOX(&spike_skip_));
  m.impl("clip_by_spike_skip_", TORCH_BOX(&clip_by_spike_skip_));
  m.impl("auto_clip_", TORCH_BOX(&auto_clip_));
  m.impl("clip_by_auto_clip_", TORCH_BOX(&clip_by_auto_clip_));
  m.impl("agc_", TORCH_BOX(&agc_));
  m.impl("watch_loss_", TORCH_BOX(&watch_loss_));
}

}  // namespace zclip::cuda
