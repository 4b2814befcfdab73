// One use of math/watch_loss.h, its arguments checked.

#pragma once

#include <optional>
#include <vector>

#include "../math/watch_loss.h"
#include "rule_op.h"

namespace zclip::cpu {

// The watch of the loss that goes with a step, its arguments checked.
class LossWatch {
 public:
  LossWatch(const std::optional<Tensor>& state, const std::optional<Tensor>& loss,
            const std::vector<double>& settings, const char* op) {
    if (!state || !loss) return;
    STD_TORCH_CHECK(settings.size() == 4, "zclip::", op,
                    ": watch_settings: expected factor, rising_steps, decay and warmup_steps, got ",
                    settings.size(), " numbers");
    state_ = state_of(*state, kNumLossState, op);
    loss_ = loss_of(*loss, op);
    settings_ = {settings[0], static_cast<int64_t>(settings[1]), settings[2],
                 static_cast<int64_t>(settings[3])};
  }

  void judge(float* verdict) const {
    if (loss_.given) watch_loss_rule(loss_.value, settings_, state_, verdict);
  }

  bool has_loss() const { return loss_.given; }

 private:
  double* state_ = nullptr;
  Loss loss_ = {false, 0.0};
  LossSettings settings_ = {};
};

}  // namespace zclip::cpu
