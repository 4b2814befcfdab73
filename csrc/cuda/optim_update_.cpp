// CUDA backend of zclip::optim_update_: checks, scratch memory and one launcher.

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "../memory_layout.h"
#include "on_device.h"
#include "ops.h"
#include "optim_update.h"

namespace zclip::cuda {
namespace {

using torch::headeronly::ScalarType;
constexpr const char* kUpdateOp = "zclip::optim_update_: ";

bool lies_alike(const Tensor& a, const Tensor& b) {
  if (a.numel() != b.numel()) return false;
  if (a.numel() < 2 || (a.is_contiguous() && b.is_contiguous())) return true;
  const auto x = a.strides(), y = b.strides();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// The address of an entry of a list of state, or null if there is none.
void* state_at(const std::vector<Tensor>& list, size_t i, const Tensor& param, bool is_wide,
               const Place& place, const char* name) {
  if (list.empty() || (list[i].numel() == 0 && param.numel() > 0)) return nullptr;
  const ScalarType wanted = is_wide ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(place.holds(list[i]) && list[i].scalar_type() == wanted, kUpdateOp, name, "[", i,
                  "]: expected ", is_wide ? "float64" : "float32", " on ", place.name(),
                  ", got another dtype or device");
  STD_TORCH_CHECK(lies_alike(list[i], param), kUpdateOp, name, "[", i,
                  "]: expected the strides and ", param.numel(), " elements of params[", i,
                  "], got ", list[i].numel(), " elements or other strides");
  return list[i].mutable_data_ptr();
}

template <typename value_t>
const value_t* numbers_or_null(const Tensor& tensor, ScalarType type, int64_t count,
                               const Place& place, const char* name) {
  if (tensor.numel() == 0) return nullptr;
  STD_TORCH_CHECK(place.holds(tensor) && tensor.scalar_type() == type && tensor.is_contiguous() &&
                      tensor.numel() == count,
                  kUpdateOp, name, ": expected a contiguous ",
                  type == ScalarType::Double ? "float64" : "float32", " tensor of ", count,
                  " elements on ", place.name(), ", or empty, got ", tensor.numel(), " elements");
  return static_cast<const value_t*>(tensor.const_data_ptr());
}

void check_lists(const std::vector<Tensor>& list, size_t count, const char* name) {
  STD_TORCH_CHECK(list.empty() || list.size() == count, kUpdateOp, name,
                  ": expected none or one for each of ", count, " params, got ", list.size());
}

}  // namespace

Updated optim_update_(std::vector<Tensor> params, std::vector<Tensor> grads,
                      std::vector<Tensor> firsts, std::vector<Tensor> seconds,
                      std::vector<Tensor> maxima, std::vector<Tensor> steps, Tensor ledger,
                      Tensor coefs, Tensor blocked, Tensor grad_scale, Tensor rates,
                      int64_t algorithm, std::vector<int64_t> sizes, std::vector<double> settings,
                      int64_t seed, bool telemetry, int64_t skip_flags) {
  const Place place(ledger);
  const size_t count = params.size();
  STD_TORCH_CHECK(grads.size() == count, kUpdateOp, "grads: expected one for each of ", count,
                  " params, got ", grads.size());
  check_lists(firsts, count, "firsts");
  check_lists(seconds, count, "seconds");
  check_lists(maxima, count, "maxima");
  check_lists(steps, count, "steps");
  STD_TORCH_CHECK(settings.size() == sizes.size() * kNumOptimSettings, kUpdateOp,
                  "settings: expected ", int{kNumOptimSettings}, " for each of ", sizes.size(),
                  " groups, got ", settings.size());
  const auto kind = static_cast<Algorithm>(algorithm);
  STD_TORCH_CHECK(kind != Algorithm::kAdam || count == 0 ||
                      (!firsts.empty() && !seconds.empty() && !steps.empty()),
                  kUpdateOp, "Adam: expected firsts, seconds and steps, got an empty list");
  STD_TORCH_CHECK(kind != Algorithm::kLion || count == 0 || !firsts.empty(), kUpdateOp,
                  "Lion: expected firsts, got an empty list");
  STD_TORCH_CHECK(place.holds(ledger) && ledger.scalar_type() == ScalarType::Long &&
                      ledger.is_contiguous() &&
                      ledger.numel() == static_cast<int64_t>(count) * kNumLedger,
                  kUpdateOp, "ledger: expected a contiguous int64 tensor of shape [", count, ", ",
                  int{kNumLedger}, "] on ", place.name(), ", got ", ledger.numel(), " elements");
  std::vector<UpdateTensor> tensors(count);
  size_t i = 0;
  for (size_t group = 0; group < sizes.size(); ++group) {
    for (int64_t k = 0; k < sizes[group]; ++k, ++i) {
      STD_TORCH_CHECK(i < count, kUpdateOp, "sizes: expected a sum of ", count,
                      ", the number of params, got more");
      const Tensor &param = params[i], &grad = grads[i];
      UpdateTensor& entry = tensors[i];
      STD_TORCH_CHECK(place.holds(param) && find_format(param.scalar_type(), &entry.param_format),
                      kUpdateOp, "params[", i,
                      "]: expected float32, bfloat16, float16 or float64 on ", place.name(),
                      ", got another dtype or device");
      const bool is_wide = entry.param_format == Format::kFloat64;
      const Layout layout = layout_of(param.dim(), param.sizes().data(), param.strides().data());
      STD_TORCH_CHECK(layout.dense || param.numel() < 2, kUpdateOp, "params[", i,
                      "]: expected a dense tensor, got one that does not fill one run of memory");
      entry.p = param.mutable_data_ptr();
      entry.numel = param.numel();
      entry.group = static_cast<int32_t>(group);
      if (grad.numel() > 0 || param.numel() == 0) {
        STD_TORCH_CHECK(
            place.holds(grad) && find_format(grad.scalar_type(), &entry.grad_format) &&
                (entry.grad_format == Format::kFloat64) == is_wide && grad.numel() == param.numel(),
            kUpdateOp, "grads[", i, "]: expected the dtype and ", param.numel(),
            " elements of params[", i, "], got ", grad.numel(), " elements or another dtype");
        STD_TORCH_CHECK(lies_alike(grad, param), kUpdateOp, "grads[", i,
                        "]: expected the strides of params[", i, "], got others");
        entry.g = grad.const_data_ptr();
        if (param.numel() == 0) entry.p = nullptr;  // nothing to read, and yet an update
      }
      entry.m = state_at(firsts, i, param, is_wide, place, "firsts");
      entry.v = state_at(seconds, i, param, is_wide, place, "seconds");
      entry.largest = state_at(maxima, i, param, is_wide, place, "maxima");
      if (!steps.empty() && steps[i].numel() > 0) {
        const ScalarType type = steps[i].scalar_type();
        STD_TORCH_CHECK(place.holds(steps[i]) && steps[i].numel() == 1 &&
                            (type == ScalarType::Float || type == ScalarType::Double),
                        kUpdateOp, "steps[", i, "]: expected one float32 or float64 number on ",
                        place.name(), ", got something else");
        entry.step = steps[i].mutable_data_ptr();
        entry.step_is_double = type == ScalarType::Double;
      }
    }
  }
  STD_TORCH_CHECK(i == count, kUpdateOp, "sizes: expected a sum of ", count,
                  ", the number of params, got ", i);
  DeviceNumber scale = {nullptr, Format::kFloat32};
  if (grad_scale.numel() > 0) {
    STD_TORCH_CHECK(place.holds(grad_scale) && grad_scale.numel() == 1 &&
                        find_format(grad_scale.scalar_type(), &scale.format),
                    kUpdateOp, "grad_scale: expected one number on ", place.name(),
                    ", or empty, got ", grad_scale.numel(), " elements");
    scale.address = grad_scale.const_data_ptr();
  }
  const Tensor rows = torch::stable::new_empty(
      ledger, {telemetry ? static_cast<int64_t>(count) : 0, kNumTelemetry}, ScalarType::Double);
  const Tensor summary = torch::stable::new_empty(ledger, {kNumSummary}, ScalarType::Float);
  const Tensor scratch = torch::stable::new_empty(
      ledger, {update_scratch_bytes(tensors.data(), static_cast<int64_t>(count))},
      ScalarType::Byte);
  const UpdateCall call = {
      kind,
      settings.data(),
      static_cast<int64_t>(sizes.size()),
      static_cast<int64_t*>(ledger.mutable_data_ptr()),
      numbers_or_null<double>(coefs, ScalarType::Double, static_cast<int64_t>(count), place,
                              "coefs"),
      numbers_or_null<float>(blocked, ScalarType::Float, blocked.numel() > 1 ? kNumVerdict : 1,
                             place, "blocked"),
      blocked.numel() > 1 ? static_cast<int>(skip_flags) : 0,
      scale,
      numbers_or_null<double>(rates, ScalarType::Double, static_cast<int64_t>(sizes.size()), place,
                              "rates"),
      static_cast<uint64_t>(seed),
      telemetry,
      static_cast<double*>(rows.mutable_data_ptr()),
      static_cast<float*>(summary.mutable_data_ptr())};
  check_launch(launch_optim_update(tensors.data(), static_cast<int64_t>(count), call,
                                   scratch.mutable_data_ptr(), place.queue()),
               "optim_update_");
  return {rows, summary};
}

}  // namespace zclip::cuda
