// CUDA backend of the operators that measure or rewrite a list of tensors: checks, scratch memory
// and one launcher each.

#include <torch/csrc/stable/ops.h>

#include "device_list.h"
#include "ops.h"

namespace zclip::cuda {
namespace {

using torch::headeronly::ScalarType;
using Access = DeviceList::Access;

Tensor empty_rows(const Tensor& like, const DeviceList& list) {
  return torch::stable::new_empty(like, {list.count(), kNumStats}, ScalarType::Double);
}

GradStats* rows_of(const Tensor& stats) {
  return static_cast<GradStats*>(stats.mutable_data_ptr());
}

}  // namespace

Tensor grad_stats(std::vector<Tensor> grads) {
  const Place place(grads.at(0));
  const DeviceList list(grads, place, Access::kRead, "grad_stats", "grads");
  const Tensor stats = empty_rows(grads[0], list), scratch = list.scratch(grads[0]);
  check_launch(launch_grad_stats(list.data(), list.count(), scratch.mutable_data_ptr(),
                                 rows_of(stats), nullptr, {}, place.queue()),
               "grad_stats");
  return stats;
}

Tensor power_stats(std::vector<Tensor> grads, double p) {
  const Place place(grads.at(0));
  const DeviceList list(grads, place, Access::kRead, "power_stats", "grads");
  const Tensor stats = empty_rows(grads[0], list), scratch = list.scratch(grads[0]);
  check_launch(launch_power_stats(list.data(), list.count(), scratch.mutable_data_ptr(),
                                  rows_of(stats), p, place.queue()),
               "power_stats");
  return stats;
}

void scale_(std::vector<Tensor> grads, Tensor coefs) {
  const Place place(first_of(grads, coefs));
  DeviceList list(grads, place, Access::kWrite, "scale_", "grads");
  STD_TORCH_CHECK(place.holds(coefs) && coefs.scalar_type() == ScalarType::Double &&
                      coefs.is_contiguous() && coefs.numel() == list.count(),
                  "zclip::scale_: coefs: expected a contiguous float64 tensor with one element per "
                  "gradient (",
                  grads.size(), "), got ", coefs.numel());
  check_launch(
      launch_scale(list.data(), list.count(), static_cast<const double*>(coefs.const_data_ptr()),
                   nullptr, place.queue()),
      "scale_");
  list.write_back();
}

void zero_nonfinite_(std::vector<Tensor> grads, Tensor stats) {
  const Place place(first_of(grads, stats));
  DeviceList list(grads, place, Access::kWrite, "zero_nonfinite_", "grads");
  STD_TORCH_CHECK(place.holds(stats) && stats.scalar_type() == ScalarType::Double &&
                      stats.is_contiguous() && stats.numel() == list.count() * kNumStats,
                  "zclip::zero_nonfinite_: stats: expected a contiguous float64 tensor of shape [",
                  grads.size(), ", 3], got ", stats.numel(), " elements");
  check_launch(launch_zero_nonfinite(list.data(), list.count(), rows_of(stats), place.queue()),
               "zero_nonfinite_");
  list.write_back();
}

void clamp_(std::vector<Tensor> grads, double limit) {
  if (grads.empty()) return;
  const Place place(grads[0]);
  DeviceList list(grads, place, Access::kWrite, "clamp_", "grads");
  check_launch(launch_clamp(list.data(), list.count(), limit, place.queue()), "clamp_");
  list.write_back();
}

Tensor fingerprint(std::vector<Tensor> tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "zclip::fingerprint: expected at least one tensor, got none");
  const Place place(tensors[0]);
  std::vector<DeviceTensor> bytes(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(place.holds(tensors[i]), "zclip::fingerprint: tensors[", i, "]: expected ",
                    place.name(), ", the device of the others, got another; call once for each");
    // Index order counts, not memory order: a transposed view hashes as its copy does.
    if (!tensors[i].is_contiguous()) tensors[i] = torch::stable::contiguous(tensors[i]);
    bytes[i] = {const_cast<void*>(tensors[i].const_data_ptr()),
                static_cast<int64_t>(tensors[i].numel() * tensors[i].element_size()), 1,
                Format::kFloat32};
  }
  const auto count = static_cast<int64_t>(tensors.size());
  const Tensor hashes = torch::stable::new_empty(tensors[0], {count}, ScalarType::Long);
  const Tensor scratch =
      torch::stable::new_empty(tensors[0], {scratch_bytes(bytes.data(), count)}, ScalarType::Byte);
  check_launch(launch_fingerprint(bytes.data(), count, scratch.mutable_data_ptr(),
                                  static_cast<int64_t*>(hashes.mutable_data_ptr()), place.queue()),
               "fingerprint");
  return hashes;
}

}  // namespace zclip::cuda
