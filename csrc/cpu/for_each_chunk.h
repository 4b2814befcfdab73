// One parallel region over all chunks of all tensors.

#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "float_mode.h"
#include "tensor_list.h"

namespace zclip::cpu {

// Below this much work, some 50 us, a second thread may cost more than it brings: waking it takes a
// few microseconds on an idle machine, and milliseconds where another process has its core.
constexpr int64_t kWorkPerThread = 262144;

// Calls fn(chunk_index, chunk) for every chunk, from several threads. Threads get equal shares of
// the work, not of the chunks: 10,000 tiny tensors and one huge one both spread evenly.
template <typename Fn>
void for_each_chunk(const TensorList& list, Fn&& fn) {
  const std::vector<int64_t>& work_before = list.work_before();
  torch::stable::parallel_for(
      0, work_before.back(), kWorkPerThread, [&](int64_t begin, int64_t end) {
        const FloatMode mode;
        auto c =
            std::lower_bound(work_before.begin(), work_before.end(), begin) - work_before.begin();
        for (; work_before[c] < end; ++c) fn(c, list.chunks()[c]);
      });
}

// Copies `len` elements between a strided tensor, from element `begin` in index order, and a
// contiguous buffer.
template <bool kToBuffer>
void copy_strided(const Span& span, int64_t begin, int64_t len, char* buffer) {
  const int64_t size = bytes_per_element(span.format);
  for (int64_t i = 0; i < len; ++i) {
    int64_t rest = begin + i;
    int64_t offset = 0;
    for (int64_t d = span.dim - 1; d >= 0; --d) {
      offset += rest % span.sizes[d] * span.strides[d];
      rest /= span.sizes[d];
    }
    char* element = span.data + offset * size;
    std::memcpy(kToBuffer ? buffer + i * size : element, kToBuffer ? element : buffer + i * size,
                size);
  }
}

// Calls visit(pointer to the chunk's first element) and returns its result. A chunk of a tensor
// with gaps is gathered first, and scattered back if it was to be written.
template <typename Visit>
decltype(auto) visit_chunk(const Span& span, const Chunk& chunk, TensorList::Access access,
                           Visit&& visit) {
  const int64_t size = bytes_per_element(span.format);
  if (span.dense) return visit_as(span.format, span.data + chunk.begin * size, visit);

  struct ScatterOnReturn {
    const Span& span;
    const Chunk& chunk;
    bool write;
    std::vector<char> buffer;
    ~ScatterOnReturn() {
      if (write) copy_strided<false>(span, chunk.begin, chunk.len, buffer.data());
    }
  } gathered = {span, chunk, access == TensorList::Access::kWrite,
                std::vector<char>(chunk.len * size)};
  copy_strided<true>(span, chunk.begin, chunk.len, gathered.buffer.data());
  return visit_as(span.format, gathered.buffer.data(), visit);
}

}  // namespace zclip::cpu
