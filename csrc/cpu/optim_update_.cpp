// CPU backend of zclip::optim_update_: one update of parameters and optimizer state, with the
// gradients scaled as they are read and never written.

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "ops.h"
#include "update_plan.h"

namespace zclip::cpu {

using torch::headeronly::ScalarType;

namespace {

// The one element of an optional argument, or `otherwise` if it is empty.
double number_or(double otherwise, const Tensor& tensor, const char* name) {
  if (tensor.numel() == 0) return otherwise;
  STD_TORCH_CHECK(
      tensor.is_cpu() && tensor.numel() == 1 &&
          (tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::Double),
      "zclip::optim_update_: ", name,
      ": expected one float32 or float64 number on the CPU, or empty, got ", tensor.numel(),
      " elements");
  return tensor.scalar_type() == ScalarType::Double
             ? *static_cast<const double*>(tensor.const_data_ptr())
             : static_cast<double>(*static_cast<const float*>(tensor.const_data_ptr()));
}

bool is_blocked(const Tensor& blocked, int64_t skip_flags) {
  if (blocked.numel() <= 1) return number_or(0.0, blocked, "blocked") != 0.0;
  STD_TORCH_CHECK(
      blocked.is_cpu() && blocked.scalar_type() == ScalarType::Float && blocked.is_contiguous() &&
          blocked.numel() == kNumVerdict,
      "zclip::optim_update_: blocked: expected one number, a contiguous float32 verdict "
      "of ",
      int{kNumVerdict}, " elements on the CPU, or empty, got ", blocked.numel(), " elements");
  const auto* verdict = static_cast<const float*>(blocked.const_data_ptr());
  return verdict[kBlocked] != 0.0f || (static_cast<int64_t>(verdict[kFlags]) & skip_flags) != 0;
}

const double* doubles_or_null(const Tensor& tensor, int64_t count, const char* name) {
  if (tensor.numel() == 0) return nullptr;
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Double &&
                      tensor.is_contiguous() && tensor.numel() == count,
                  "zclip::optim_update_: ", name, ": expected a contiguous float64 tensor of ",
                  count, " elements on the CPU, or empty, got ", tensor.numel(), " elements");
  return static_cast<const double*>(tensor.const_data_ptr());
}

}  // namespace

void check_settings(const std::vector<double>& settings, int64_t groups, const char* op) {
  STD_TORCH_CHECK(static_cast<int64_t>(settings.size()) == groups * kNumOptimSettings,
                  "zclip::", op, ": settings: expected ", int{kNumOptimSettings}, " for each of ",
                  groups, " groups, got ", settings.size());
}

Updated optim_update_(std::vector<Tensor> params, std::vector<Tensor> grads,
                      std::vector<Tensor> firsts, std::vector<Tensor> seconds,
                      std::vector<Tensor> maxima, std::vector<Tensor> steps, Tensor ledger,
                      Tensor coefs, Tensor blocked, Tensor grad_scale, Tensor rates,
                      int64_t algorithm, std::vector<int64_t> sizes, std::vector<double> settings,
                      int64_t seed, bool telemetry, int64_t skip_flags) {
  const char* op = "optim_update_";
  UpdatePlan plan(static_cast<Algorithm>(algorithm), std::move(params),
                  {std::move(firsts), std::move(seconds), std::move(maxima), std::move(steps)},
                  ledger, std::move(sizes), telemetry, op);
  check_settings(settings, plan.num_groups(), op);
  const TensorList gradients(grads, TensorList::Access::kRead, op, "grads");
  plan.check_gradients(gradients, op);
  const StepNumbers numbers = {doubles_or_null(coefs, plan.count(), "coefs"),
                               number_or(1.0, grad_scale, "grad_scale"),
                               doubles_or_null(rates, plan.num_groups(), "rates"), settings.data(),
                               static_cast<uint64_t>(seed)};
  Tensor found = torch::stable::new_empty(ledger, {telemetry ? plan.count() : 0, kNumTelemetry},
                                          ScalarType::Double);
  Tensor summary = torch::stable::new_empty(ledger, {kNumSummary}, ScalarType::Float);
  auto* rows = static_cast<double*>(found.mutable_data_ptr());
  auto* columns = static_cast<float*>(summary.mutable_data_ptr());
  if (is_blocked(blocked, skip_flags)) {
    report_skipped(telemetry ? plan.count() : 0, rows, columns);
  } else {
    plan.update(gradients, numbers, rows, columns);
  }
  return {found, summary};
}

}  // namespace zclip::cpu
