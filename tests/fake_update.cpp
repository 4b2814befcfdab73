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
