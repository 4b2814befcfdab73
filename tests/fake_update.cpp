// An optimizer update against the CUDA runtime of fake_cudart.cpp. No address is ever followed.

#include <cstdint>
#include <vector>

#include "../csrc/cuda/optim_update.h"

extern "C" int fake_update(int64_t count, int64_t numel, int64_t groups, void* stream) {
  using namespace zclip;
  void* somewhere = reinterpret_cast<void*>(uintptr_t{1} << 40);
  std::vector<cuda::UpdateTensor> tensors(count);
  for (int64_t i = 0; i < count; ++i) {
    tensors[i] = {somewhere,
                  somewhere,
                  somewhere,
                  somewhere,
                  nullptr,
                  somewhere,
                  numel,
                  Format::kFloat32,
                  Format::kFloat32,
                  /*double=*/false,
                  static_cast<int32_t>(i * groups / count)};
  }
  const std::vector<double> settings(groups * kNumOptimSettings, 0.5);
  cuda::UpdateCall call = {};
  call.algorithm = Algorithm::kAdam;
  call.settings = settings.data();
  call.num_groups = groups;
  call.ledger = static_cast<int64_t*>(somewhere);
  call.telemetry = true;
  call.rows = static_cast<double*>(somewhere);
  call.summary = static_cast<float*>(somewhere);
  return cuda::launch_optim_update(tensors.data(), count, call, somewhere, {stream, 0});
}

// A whole step: statistics and rule, then the update, whatever the coefficient.
extern "C" int fake_clip_and_update(int64_t count, int64_t numel, void* stream) {
  using namespace zclip;
  void* somewhere = reinterpret_cast<void*>(uintptr_t{1} << 40);
  const std::vector<cuda::DeviceTensor> grads(count, {somewhere, numel, 1, Format::kFloat32});
  cuda::Rule rule = {};
  rule.id = RuleId::kGlobalNorm;
  rule.settings[0] = 1.0;
  if (int error =
          cuda::launch_grad_stats(grads.data(), count, somewhere,
                                  static_cast<GradStats*>(somewhere), &rule, {}, {stream, 0})) {
    return error;
  }
  return fake_update(count, numel, 1, stream);
}
