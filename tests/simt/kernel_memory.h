// Tensors for kernel_check: at any alignment, with nothing readable or writable around them that
// would go unnoticed.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "../../csrc/cuda/launchers.h"
#include "sanitizers.h"
#include "schedule.h"

namespace kernel_check {

using namespace zclip;
using zclip::cuda::DeviceTensor;

// Without ASan the bytes around a tensor are all ones: read as numbers they are NaN, and written to
// they are no longer. With ASan nothing stands behind a tensor.
constexpr size_t kGuard = 64;
constexpr unsigned char kGuardByte = 0xff;

class GuardedTensor {
 public:
  GuardedTensor(Format format, int64_t numel, int64_t elements_past_alignment, int64_t rows = 1)
      : format_(format), numel_(numel), rows_(rows) {
    before_ = kGuard + elements_past_alignment * bytes_per_element(format);
    const size_t after = SIMT_ASAN ? 0 : kGuard;
    size_ = before_ + bytes() + after;
    memory_.reset(static_cast<char*>(malloc(size_)));
    memset(memory_.get(), kGuardByte, size_);
  }

  char* data() const { return memory_.get() + before_; }
  int64_t numel() const { return numel_; }
  int64_t bytes() const { return numel_ * bytes_per_element(format_); }
  Format format() const { return format_; }
  DeviceTensor device_tensor() const {
    return {data(), rows_ > 0 ? numel_ / rows_ : 0, rows_, format_};
  }

  double get(int64_t i) const {
    switch (format_) {
      case Format::kFloat32:
        return reinterpret_cast<float*>(data())[i];
      case Format::kBfloat16:
        return widen(reinterpret_cast<Bfloat16*>(data())[i]);
      case Format::kFloat16:
        return widen(reinterpret_cast<Float16*>(data())[i]);
      default:
        return reinterpret_cast<double*>(data())[i];
    }
  }
  void set(int64_t i, double value) {
    switch (format_) {
      case Format::kFloat32:
        reinterpret_cast<float*>(data())[i] = static_cast<float>(value);
        break;
      case Format::kBfloat16:
        narrow(static_cast<float>(value), reinterpret_cast<Bfloat16*>(data()) + i);
        break;
      case Format::kFloat16:
        narrow(static_cast<float>(value), reinterpret_cast<Float16*>(data()) + i);
        break;
      default:
        reinterpret_cast<double*>(data())[i] = value;
    }
  }

  std::vector<char> copy() const { return {data(), data() + bytes()}; }
  bool guards_are_intact() const {
    for (size_t i = 0; i < size_; ++i) {
      const bool inside = i >= before_ && i < before_ + bytes();
      if (!inside && static_cast<unsigned char>(memory_.get()[i]) != kGuardByte) return false;
    }
    return true;
  }

 private:
  struct Free {
    void operator()(char* memory) const { free(memory); }
  };

  Format format_;
  int64_t numel_, rows_;
  size_t before_, size_;
  std::unique_ptr<char, Free> memory_;
};

using Tensors = std::vector<GuardedTensor>;

inline std::vector<DeviceTensor> device_list(const Tensors& tensors) {
  std::vector<DeviceTensor> list;
  for (const GuardedTensor& tensor : tensors) list.push_back(tensor.device_tensor());
  return list;
}

// Uniform in [-1, 1), times scale.
inline void fill(GuardedTensor& tensor, simt::Random& random, double scale = 1.0) {
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    tensor.set(i, (static_cast<double>(random.next() >> 11) * 0x1p-52 - 1.0) * scale);
  }
}

// Scratch memory of any content, as an allocator hands it out.
class Scratch {
 public:
  Scratch(const std::vector<DeviceTensor>& list, simt::Random& random)
      : words_(cuda::scratch_bytes(list.data(), static_cast<int64_t>(list.size())) / 8) {
    for (uint64_t& word : words_) word = random.next();
  }
  void* data() { return words_.data(); }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace kernel_check
