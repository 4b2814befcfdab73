// CPU backend of zclip::watch_loss_. The arithmetic is in math/.

#include "../math/watch_loss.h"

#include "rule_op.h"

namespace zclip::cpu {

void watch_loss_(Tensor state, Tensor loss, Tensor verdict, double factor, int64_t rising_steps,
                 double decay, int64_t warmup_steps) {
  const char* op = "watch_loss_";
  double* columns = state_of(state, kNumLossState, op);
  STD_TORCH_CHECK(verdict.is_cpu() && verdict.scalar_type() == ScalarType::Float &&
                      verdict.is_contiguous() && verdict.numel() == kNumVerdict,
                  "zclip::watch_loss_: verdict: expected a contiguous float32 tensor of ",
                  kNumVerdict, " elements on the CPU, got ", verdict.numel());
  const Loss given = loss_of(loss, op);
  if (!given.given) return;
  const FloatMode mode;
  watch_loss_rule(given.value, {factor, rising_steps, decay, warmup_steps}, columns,
                  static_cast<float*>(verdict.mutable_data_ptr()));
}

}  // namespace zclip::cpu
