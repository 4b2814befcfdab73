// A list of tensors as the CPU kernels see it: addresses, lengths, formats, and the fixed chunks
// they are cut into. This is the only place where the CPU backend looks inside a torch tensor.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../math/grad_stats.h"
#include "../memory_layout.h"

namespace zclip::cpu {

using torch::stable::Tensor;

// One tensor. Dense means that its elements fill one run of memory in some order: sums and
// scalings do not care which, so transposed and channels-last gradients need no copy.
struct Span {
  char* data;
  int64_t numel;
  Format format;
  bool dense;
  int64_t dim;
  const int64_t* sizes;
  const int64_t* strides;  // in elements
  int64_t first_row;
  int64_t rows;
};

struct Chunk {
  int32_t tensor;
  int64_t begin;  // in elements
  int64_t len;
  int64_t row;  // of the whole list
};

class TensorList {
 public:
  enum class Access { kRead, kWrite };
  // What is cut into chunks: whole tensors, in any order of their elements; or rows, each of which
  // is what stands at one index of the first dimension, and all of a tensor with fewer than two.
  // A tensor is one row of its list unless it is cut by rows.
  enum class Cut { kTensors, kRows };

  // Raises, before anything is written, if a tensor cannot be served; `op` and `argument` name the
  // place in the message.
  TensorList(const std::vector<Tensor>& tensors, Access access, const char* op,
             const char* argument, Cut cut = Cut::kTensors);

  // Of dense tensors that were looked at elsewhere; `dims` is what their sizes point into.
  TensorList(std::vector<Span> spans, std::shared_ptr<const std::vector<int64_t>> dims);

  // Notes where a tensor lies now.
  void move(size_t tensor, char* data) { spans_[tensor].data = data; }

  const std::vector<Span>& spans() const { return spans_; }
  const std::vector<Chunk>& chunks() const { return chunks_; }
  // Work in front of each chunk, in elements plus a fixed price per chunk, with the total last.
  const std::vector<int64_t>& work_before() const { return work_before_; }
  bool has_float64() const { return has_float64_; }
  int64_t num_rows() const { return num_rows_; }

 private:
  void cut_into_chunks();

  std::shared_ptr<const std::vector<int64_t>> dims_;
  std::vector<Span> spans_;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> work_before_;
  bool has_float64_ = false;
  int64_t num_rows_ = 0;
};

// Calls visit(pointer) with the pointer typed after the format.
template <typename Visit>
decltype(auto) visit_as(Format format, char* data, Visit&& visit) {
  switch (format) {
    case Format::kFloat32:
      return visit(reinterpret_cast<float*>(data));
    case Format::kBfloat16:
      return visit(reinterpret_cast<Bfloat16*>(data));
    case Format::kFloat16:
      return visit(reinterpret_cast<Float16*>(data));
    default:
      return visit(reinterpret_cast<double*>(data));
  }
}

}  // namespace zclip::cpu
