// A list of tensors as the launchers want it. This and on_device.h are the only places where the
// CUDA backend looks inside a torch tensor.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "device_tensor.h"
#include "on_device.h"

namespace zclip::cuda {

class DeviceList {
 public:
  enum class Access { kRead, kWrite };
  // As in the CPU backend: agc_ cuts by rows, all others measure whole tensors.
  enum class Cut { kTensors, kRows };

  // Raises, before anything is written, if a tensor cannot be served; `op` and `argument` name the
  // place in the message. A tensor whose elements do not fill one run of memory (or, cut by rows,
  // whose rows do not) is copied; no others are.
  DeviceList(const std::vector<Tensor>& tensors, const Place& place, Access access, const char* op,
             const char* argument, Cut cut = Cut::kTensors);

  const DeviceTensor* data() const { return tensors_.data(); }
  int64_t count() const { return static_cast<int64_t>(tensors_.size()); }
  int64_t rows() const { return rows_; }
  bool has_float64() const { return has_float64_; }

  // Scratch memory from torch's caching allocator; of any content.
  Tensor scratch(const Tensor& like) const;

  // Writes the copies back to where they came from. To be called after the last launch that writes.
  void write_back();

 private:
  struct Copy {
    Tensor original;
    Tensor copy;
  };

  std::vector<DeviceTensor> tensors_;
  std::vector<Copy> copies_;
  int64_t rows_ = 0;
  bool has_float64_ = false;
};

}  // namespace zclip::cuda
