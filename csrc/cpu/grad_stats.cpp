// CPU backend of zclip::grad_stats: every gradient is read once, all of them in one parallel
// region.

#include "../math/grad_stats.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "chunk_stats.h"
#include "for_each_chunk.h"
#include "ops.h"

namespace zclip::cpu {

std::vector<GradStats> measure(const TensorList& grads) {
  const bool avx2 = use_avx2();
  std::vector<GradStats> slots(grads.chunks().size());
  for_each_chunk(grads, [&](int64_t c, const Chunk& chunk) {
    slots[c] = visit_chunk(grads.spans()[chunk.tensor], chunk, TensorList::Access::kRead,
                           [&](auto* data) { return chunk_stats(data, chunk.len, avx2); });
  });
  // Slots are added in index order, whichever thread filled them.
  std::vector<GradStats> rows(grads.spans().size());
  for (size_t c = 0; c < slots.size(); ++c) merge(rows[grads.chunks()[c].tensor], slots[c]);
  return rows;
}

Tensor grad_stats(const std::vector<Tensor>& grads) {
  const TensorList list(grads, TensorList::Access::kRead, "grad_stats", "grads");
  const std::vector<GradStats> rows = measure(list);
  Tensor stats =
      torch::stable::new_empty(grads.at(0), {static_cast<int64_t>(grads.size()), kNumStats},
                               torch::headeronly::ScalarType::Double);
  std::copy(rows.begin(), rows.end(), static_cast<GradStats*>(stats.mutable_data_ptr()));
  return stats;
}

}  // namespace zclip::cpu
