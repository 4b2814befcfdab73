// watch_loss_: a handful of scalars, for one thread. The arithmetic is in math/.

#pragma once

#include "../math/watch_loss.h"
#include "apply_rule.cuh"

namespace zclip::cuda {

// grid: one block of one thread, which writes state and verdict.
__global__ void watch_loss(const DeviceNumber loss, const LossSettings settings, double* state,
                           float* verdict) {
  watch_loss_rule(read_number(loss), settings, state, verdict);
}

}  // namespace zclip::cuda
