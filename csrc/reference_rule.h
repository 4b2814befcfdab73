// A rule without compiled code: Python answers, with the rule's reference, on the tensors' device.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace zclip {

// Returns coefs and verdict, and moves the state.
inline std::tuple<torch::stable::Tensor, torch::stable::Tensor> reference_rule(
    const torch::stable::Tensor& state, const torch::stable::Tensor& stats, int64_t rule,
    const std::vector<double>& settings, const std::optional<torch::stable::Tensor>& loss) {
  using torch::stable::Tensor;
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 5> stack{from(state), from(stats), from(rule), from(settings),
                                    from(loss)};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("zclip::reference_rule_", "", stack.data(), TORCH_ABI_VERSION));
  Tensor coefs = to<Tensor>(stack[0]);
  return {coefs, to<Tensor>(stack[1])};
}

}  // namespace zclip
