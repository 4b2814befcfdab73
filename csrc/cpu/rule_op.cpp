#include "rule_op.h"

#include <algorithm>
#include <initializer_list>

namespace zclip::cpu {

double* state_of(const Tensor& state, int64_t size, const char* op) {
  STD_TORCH_CHECK(state.is_cpu() && state.scalar_type() == ScalarType::Double &&
                      state.is_contiguous() && state.numel() == size,
                  "zclip::", op, ": state: expected a contiguous float64 tensor of ", size,
                  " elements on the CPU, got ", state.numel());
  return static_cast<double*>(state.mutable_data_ptr());
}

Loss loss_of(const Tensor& loss, const char* op) {
  STD_TORCH_CHECK(loss.is_cpu() && loss.numel() <= 1, "zclip::", op,
                  ": loss: expected one element, or none, on the CPU, got ", loss.numel());
  if (loss.numel() == 0) return {false, 0.0};
  const TensorList list({loss}, TensorList::Access::kRead, op, "loss");
  const Span& span = list.spans()[0];
  return {true, visit_as(span.format, span.data,
                         [](auto* value) { return static_cast<double>(widen(*value)); })};
}

// Past the dispatcher: four ways through it take longer than to measure a small model.
Tensor empty_on_cpu(std::initializer_list<int64_t> sizes, ScalarType type) {
  const int64_t strides[] = {sizes.size() == 2 ? sizes.begin()[1] : 1, 1};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)),
      aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Measured make_results(const TensorList& grads) {
  const auto count = static_cast<int64_t>(grads.spans().size());
  const ScalarType norm_type = grads.has_float64() ? ScalarType::Double : ScalarType::Float;
  return {empty_on_cpu({}, norm_type), empty_on_cpu({count, kNumStats}, ScalarType::Double),
          empty_on_cpu({count}, ScalarType::Double),
          empty_on_cpu({kNumVerdict}, ScalarType::Float)};
}

void fill_measured(const Measured& results, const std::vector<GradStats>& rows, double norm) {
  std::copy(rows.begin(), rows.end(), static_cast<GradStats*>(results.stats.mutable_data_ptr()));
  if (results.norm.scalar_type() == ScalarType::Double) {
    *static_cast<double*>(results.norm.mutable_data_ptr()) = norm;
  } else {
    *static_cast<float*>(results.norm.mutable_data_ptr()) = static_cast<float>(norm);
  }
}

}  // namespace zclip::cpu
