// CPU backend of zclip::grad_stats: every gradient is read once, all of them in one parallel
// region.

#include "../math/grad_stats.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "for_each_chunk.h"
#include "ops.h"
#include "sum_of_squares.h"

namespace zclip::cpu {
namespace {

template <typename number_t>
bool all_zero(const number_t* data, int64_t len) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(data);
  unsigned char any = 0;
  for (int64_t i = 0; i < len * int64_t{sizeof(number_t)}; ++i) any |= bytes[i];
  return any == 0;
}

template <typename number_t>
GradStats chunk_stats(const number_t* data, int64_t len, bool avx2) {
#if ZCLIP_HAS_AVX2
  const double quick = avx2 ? avx2::sum_of_squares(data, len) : portable::sum_of_squares(data, len);
#else
  (void)avx2;
  const double quick = portable::sum_of_squares(data, len);
#endif
  if (trustworthy(quick)) return {quick, 0.0, 0.0};
  GradStats stats = {};
  if (quick == 0.0 && all_zero(data, len)) return stats;
  for (int64_t i = 0; i < len; ++i) observe(stats, data[i]);
  return stats;
}

}  // namespace

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

Tensor grad_stats(std::vector<Tensor> grads) {
  const TensorList list(grads, TensorList::Access::kRead, "grad_stats", "grads");
  const std::vector<GradStats> rows = measure(list);
  Tensor stats =
      torch::stable::new_empty(grads.at(0), {static_cast<int64_t>(grads.size()), kNumStats},
                               torch::headeronly::ScalarType::Double);
  std::copy(rows.begin(), rows.end(), static_cast<GradStats*>(stats.mutable_data_ptr()));
  return stats;
}

}  // namespace zclip::cpu
