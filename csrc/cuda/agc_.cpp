// CUDA backend of zclip::agc_. By rows, so it takes five launches where the other rules take two.

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "rule_op.h"

namespace zclip::cuda {
namespace {

void check_same_shapes(const std::vector<Tensor>& grads, const std::vector<Tensor>& params) {
  STD_TORCH_CHECK(grads.size() == params.size(),
                  "zclip::agc_: expected one parameter per gradient (", grads.size(), "), got ",
                  params.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    const auto have = params[i].sizes(), want = grads[i].sizes();
    STD_TORCH_CHECK(
        have.size() == want.size() && std::equal(have.begin(), have.end(), want.begin()),
        "zclip::agc_: params[", i, "]: expected the shape of grads[", i, "], got another");
  }
}

}  // namespace

Clipped agc_(std::vector<Tensor> grads, std::vector<Tensor> params, Tensor state, double clip,
             double eps, int64_t on_nonfinite) {
  using torch::headeronly::ScalarType;
  using Access = DeviceList::Access;
  const char* op = "agc_";
  const Place place(first_of(grads, state));
  check_same_shapes(grads, params);
  DeviceList list(grads, place, Access::kWrite, op, "grads", DeviceList::Cut::kRows);
  const DeviceList weights(params, place, Access::kRead, op, "params", DeviceList::Cut::kRows);
  const Results results = make_results(list, state);
  const Tensor grad_scratch = list.scratch(state), weight_scratch = weights.scratch(state);
  const Tensor per_tensor = torch::stable::new_empty(state, {2 * list.count()}, ScalarType::Double);
  const Tensor row_coefs = torch::stable::new_empty(state, {list.rows()}, ScalarType::Double);
  const AgcCall call = {clip,
                        eps,
                        static_cast<OnNonFinite>(on_nonfinite),
                        state_of(state, kNumCounters, place, op),
                        results.rows(),
                        static_cast<double*>(per_tensor.mutable_data_ptr()),
                        static_cast<double*>(row_coefs.mutable_data_ptr())};
  check_launch(
      launch_agc(list.data(), weights.data(), list.count(), grad_scratch.mutable_data_ptr(),
                 weight_scratch.mutable_data_ptr(), call, results.judgement(), place.queue()),
      op);
  list.write_back();
  return results.clipped();
}

}  // namespace zclip::cuda
