// zclip::read_probe reads every byte and computes next to nothing: the ceiling that benchmarks hold
// grad_stats against.

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>

#include "for_each_chunk.h"
#include "ops.h"
#include "sum_of_squares.h"

namespace zclip::cpu {

Tensor read_probe(const std::vector<Tensor>& tensors) {
  const TensorList list(tensors, TensorList::Access::kRead, "read_probe", "tensors");
  Tensor all = torch::stable::new_empty(tensors.at(0), {static_cast<int64_t>(list.chunks().size())},
                                        torch::headeronly::ScalarType::Long);
  auto* out = static_cast<uint64_t*>(all.mutable_data_ptr());
  for_each_chunk(list, [&](int64_t c, const Chunk& chunk) {
    const Span& span = list.spans()[chunk.tensor];
    const int64_t size = bytes_per_element(span.format);
    const char* data = span.data + chunk.begin * size;
    uint64_t lanes[16] = {};
    for (int64_t byte = 0; byte + 128 <= chunk.len * size; byte += 128) {
      __builtin_prefetch(data + byte + kPrefetchBytes);
      __builtin_prefetch(data + byte + kPrefetchBytes + 64);
      uint64_t words[16];
      std::memcpy(words, data + byte, sizeof words);
      for (int i = 0; i < 16; ++i) lanes[i] |= words[i];
    }
    out[c] = 0;
    for (const uint64_t lane : lanes) out[c] |= lane;
  });
  return all;
}

}  // namespace zclip::cpu
