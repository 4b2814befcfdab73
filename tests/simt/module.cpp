// The whole CUDA backend, binding and kernels, built for the emulator: the operators of
// csrc/cuda/register_ops.h under the name torch.ops.zclip_simt, for CPU tensors.

#include <torch/csrc/stable/library.h>

#include "python_face.h"

#include "../../csrc/cuda/agc_.cpp"
#include "../../csrc/cuda/device_list.cpp"
#include "../../csrc/cuda/grad_ops.cpp"
#include "../../csrc/cuda/launchers.cu"
#include "../../csrc/cuda/optim_update_.cpp"
#include "../../csrc/cuda/register_ops.h"
#include "../../csrc/cuda/rule_op.cpp"
#include "../../csrc/cuda/rule_ops.cpp"
#include "../../csrc/cuda/update_launcher.cu"

STABLE_TORCH_LIBRARY_IMPL(zclip_simt, CPU, m) { zclip::cuda::register_ops(m); }

PYBIND11_MODULE(MODULE_NAME, module) {
  simt::bind_schedule(module);
  module.attr("CHUNK") = zclip::cuda::kDeviceChunk;
  module.attr("SMALL_TABLE") = zclip::cuda::SmallTable::kCapacity;
  module.attr("LARGE_TABLE") = zclip::cuda::LargeTable::kCapacity;
  module.def("set_multiprocessors",
             [](int64_t count) { zclip::cuda::emulated_multiprocessors = count; });
}
