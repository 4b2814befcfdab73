#include "rule_op.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "../memory_layout.h"

namespace zclip::cuda {

using torch::headeronly::ScalarType;

double* state_of(const Tensor& state, int64_t size, const Place& place, const char* op) {
  STD_TORCH_CHECK(place.holds(state) && state.scalar_type() == ScalarType::Double &&
                      state.is_contiguous() && state.numel() == size,
                  "zclip::", op, ": state: expected a contiguous float64 tensor of ", size,
                  " elements on ", place.name(), ", got ", state.numel());
  return static_cast<double*>(state.mutable_data_ptr());
}

DeviceNumber loss_of(const Tensor& loss, const Place& place, const char* op) {
  STD_TORCH_CHECK(place.holds(loss) && loss.numel() <= 1, "zclip::", op,
                  ": loss: expected one element, or none, on ", place.name(), ", got ",
                  loss.numel());
  if (loss.numel() == 0) return {nullptr, Format::kFloat32};
  DeviceNumber number = {loss.const_data_ptr(), Format::kFloat32};
  STD_TORCH_CHECK(find_format(loss.scalar_type(), &number.format), "zclip::", op,
                  ": loss: expected float32, bfloat16, float16 or float64, got another dtype");
  return number;
}

Judgement Results::judgement() const {
  return {static_cast<double*>(coefs.mutable_data_ptr()),
          static_cast<float*>(verdict.mutable_data_ptr()), norm.mutable_data_ptr(),
          norm.scalar_type() == ScalarType::Double};
}

Results make_results(const DeviceList& grads, const Tensor& like) {
  const ScalarType norm_type = grads.has_float64() ? ScalarType::Double : ScalarType::Float;
  return {torch::stable::new_empty(like, {}, norm_type),
          torch::stable::new_empty(like, {grads.count(), kNumStats}, ScalarType::Double),
          torch::stable::new_empty(like, {grads.count()}, ScalarType::Double),
          torch::stable::new_empty(like, {kNumVerdict}, ScalarType::Float)};
}

}  // namespace zclip::cuda
