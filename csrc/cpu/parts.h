// Tensors of any dtype as runs of bytes, cut into parts that threads share.

#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace zclip::cpu {

constexpr int64_t kBytesPerPart = 1 << 17;  // a multiple of a word; as much as a float64 chunk
constexpr int64_t kPartsPerThread = 8;      // below a second thread costs more than it brings

struct Part {
  const char* data;  // of the whole tensor
  int64_t begin;     // in bytes, at a word
  int64_t end;
  size_t tensor;
};

inline std::vector<Part> cut_into_parts(const std::vector<torch::stable::Tensor>& tensors) {
  std::vector<Part> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto bytes = static_cast<int64_t>(tensors[i].numel() * tensors[i].element_size());
    const auto* data = static_cast<const char*>(tensors[i].const_data_ptr());
    for (int64_t begin = 0; begin < bytes; begin += kBytesPerPart) {
      parts.push_back({data, begin, std::min(begin + kBytesPerPart, bytes), i});
    }
  }
  return parts;
}

// Calls fn(index) for every part, from several threads.
template <typename Fn>
void for_each_part(const std::vector<Part>& parts, Fn&& fn) {
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), kPartsPerThread,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t p = begin; p < end; ++p) fn(p);
                              });
}

}  // namespace zclip::cpu
