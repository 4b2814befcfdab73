// CPU backend of zclip::power_stats: the norms other than the Euclidean one. In float64 throughout;
// few people need these, and none of them in a hurry.

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>

#include "for_each_chunk.h"
#include "ops.h"

namespace zclip::cpu {
namespace {

template <typename number_t>
GradStats chunk_powers(const number_t* data, int64_t len, double p) {
  GradStats stats = {};
  for (int64_t i = 0; i < len; ++i) {
    const auto value = widen(data[i]);
    stats.nan += is_nan(value) ? 1.0 : 0.0;
    stats.inf += is_inf(value) ? 1.0 : 0.0;
    const double size = is_finite(value) ? std::fabs(static_cast<double>(value)) : 0.0;
    if (std::isinf(p)) {
      stats.sumsq = std::max(stats.sumsq, size);
    } else {
      stats.sumsq += p == 1.0 ? size : std::pow(size, p);
    }
  }
  return stats;
}

}  // namespace

Tensor power_stats(const std::vector<Tensor>& grads, double p) {
  const TensorList list(grads, TensorList::Access::kRead, "power_stats", "grads");
  std::vector<GradStats> slots(list.chunks().size());
  for_each_chunk(list, [&](int64_t c, const Chunk& chunk) {
    slots[c] = visit_chunk(list.spans()[chunk.tensor], chunk, TensorList::Access::kRead,
                           [&](auto* data) { return chunk_powers(data, chunk.len, p); });
  });
  Tensor stats =
      torch::stable::new_empty(grads.at(0), {static_cast<int64_t>(grads.size()), kNumStats},
                               torch::headeronly::ScalarType::Double);
  auto* rows = static_cast<GradStats*>(stats.mutable_data_ptr());
  std::fill(rows, rows + grads.size(), GradStats{});
  for (size_t c = 0; c < slots.size(); ++c) {
    GradStats& row = rows[list.chunks()[c].tensor];
    const double largest = std::max(row.sumsq, slots[c].sumsq);
    merge(row, slots[c]);
    if (std::isinf(p)) row.sumsq = largest;
  }
  return stats;
}

}  // namespace zclip::cpu
