#include "tensor_list.h"

#include <torch/headeronly/core/Layout.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <utility>

namespace zclip::cpu {
namespace {

// What a chunk costs beyond its elements, in elements. It keeps thousands of tiny tensors from
// weighing nothing beside one huge one when work is split among threads.
constexpr int64_t kWorkPerChunk = 64;

}  // namespace

TensorList::TensorList(const std::vector<Tensor>& tensors, Access access, const char* op,
                       const char* argument, Cut cut) {
  spans_.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    Span& span = spans_[i];
    STD_TORCH_CHECK(
        tensor.is_cpu(), "zclip::", op, ": ", argument, "[", i,
        "]: expected a tensor on the CPU like the others, got another device; call once for each");
    STD_TORCH_CHECK(find_format(tensor.scalar_type(), &span.format), "zclip::", op, ": ", argument,
                    "[", i, "]: expected float32, bfloat16, float16 or float64, got another dtype");
    span.data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
    span.numel = tensor.numel();
    span.dense = tensor.is_contiguous();
    has_float64_ |= span.format == Format::kFloat64;
    span.rows = cut == Cut::kRows && tensor.dim() > 1 ? tensor.size(0) : 1;
    span.first_row = num_rows_;
    num_rows_ += span.rows;
    if (span.dense) continue;

    span.dim = tensor.dim();
    span.sizes = tensor.sizes().data();
    span.strides = tensor.strides().data();
    const Layout layout = layout_of(span.dim, span.sizes, span.strides);
    // Rows may be read where they lie if each is one run of memory, as in channels_last.
    const bool rows_are_runs = span.rows == 1 || span.strides[0] * span.rows == span.numel;
    span.dense = layout.dense && rows_are_runs;
    STD_TORCH_CHECK(access == Access::kRead || !layout.overlaps, "zclip::", op, ": ", argument, "[",
                    i,
                    "]: expected memory of its own, got elements that share memory (expand()?); "
                    "pass a clone()");
  }
  cut_into_chunks();
}

TensorList::TensorList(std::vector<Span> spans, std::shared_ptr<const std::vector<int64_t>> dims)
    : dims_(std::move(dims)),
      spans_(std::move(spans)),
      num_rows_(static_cast<int64_t>(spans_.size())) {
  for (const Span& span : spans_) has_float64_ |= span.format == Format::kFloat64;
  cut_into_chunks();
}

void TensorList::cut_into_chunks() {
  chunks_.reserve(spans_.size());
  for (size_t i = 0; i < spans_.size(); ++i) {
    const Span& span = spans_[i];
    const int64_t row_len = span.rows > 0 ? span.numel / span.rows : 0;
    for (int64_t row = 0; row < span.rows; ++row) {
      for (int64_t begin = 0; begin < row_len; begin += kChunk) {
        chunks_.push_back({static_cast<int32_t>(i), row * row_len + begin,
                           std::min(kChunk, row_len - begin), span.first_row + row});
      }
    }
  }
  work_before_.resize(chunks_.size() + 1);
  work_before_[0] = 0;
  for (size_t c = 0; c < chunks_.size(); ++c) {
    work_before_[c + 1] = work_before_[c] + chunks_[c].len + kWorkPerChunk;
  }
}

}  // namespace zclip::cpu
