// The device a call works on: its guard, its current stream, and whether a tensor lives there.
// Built with ZCLIP_SIMT the device is the CPU, where the tests execute the kernels.

#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

#include "launchers.h"

#if !defined(ZCLIP_SIMT)
// Lives in libtorch_cuda. Weak, so that the extension also loads where torch has no CUDA.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream)
    __attribute__((weak));
#endif

namespace zclip::cuda {

using torch::stable::Tensor;

// Sees to it that everything launched while it lives goes to one device and its current stream.
class Place {
 public:
#if defined(ZCLIP_SIMT)
  explicit Place(const Tensor&) {}
  bool holds(const Tensor& tensor) const { return tensor.is_cpu(); }
  std::string name() const { return "the CPU"; }
  Queue queue() const { return {nullptr, 0}; }
#else
  explicit Place(const Tensor& tensor)
      : device_(tensor.get_device_index()), guard_(tensor.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                    "zclip: this torch has no CUDA, or the extension was linked without libtorch");
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream_));
  }
  bool holds(const Tensor& tensor) const {
    return tensor.is_cuda() && tensor.get_device_index() == device_;
  }
  std::string name() const { return "cuda:" + std::to_string(device_); }
  Queue queue() const { return {stream_, device_}; }

 private:
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
#endif
};

// The tensor that says where a call works: the first of a list, or what else there is.
inline const Tensor& first_of(const std::vector<Tensor>& tensors, const Tensor& otherwise) {
  return tensors.empty() ? otherwise : tensors[0];
}

// Raises if a launch was refused. What goes wrong on the device later is not seen here: nobody
// waits for it.
inline void check_launch(int error, const char* op) {
  STD_TORCH_CHECK(error == 0, "zclip::", op, ": the launch failed: ", error_text(error));
}

}  // namespace zclip::cuda
