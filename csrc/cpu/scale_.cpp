// CPU backend of zclip::scale_, zclip::zero_nonfinite_ and zclip::clamp_: what may be done to a
// gradient in place. A tensor that needs nothing is not even read.

#include "../math/scale.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "for_each_chunk.h"
#include "ops.h"
#include "scale_avx2.h"

namespace zclip::cpu {
namespace {

template <typename number_t>
void scale_chunk(number_t* data, int64_t len, double coef, bool avx2) {
  if (coef == kRefuse) {
    std::fill_n(data, len, number_t{});
  } else if (std::fabs(coef) < kSmallestNormalFloat && coef != 0.0) {
    for (int64_t i = 0; i < len; ++i) scale_one_wide(data[i], coef);
  } else if (avx2) {
    scale_with_avx2(data, len, coef);
  } else {
    const auto factor = static_cast<decltype(widen(*data))>(coef);
    for (int64_t i = 0; i < len; ++i) scale_one(data[i], factor);
  }
}

template <typename number_t, typename value_t>
void clamp_chunk(number_t* data, int64_t len, value_t bound, bool avx2) {
  if constexpr (std::is_same_v<number_t, float>) {
    if (avx2) return clamp_with_avx2(data, len, bound);
  }
  for (int64_t i = 0; i < len; ++i) clamp_one(data[i], bound);
}

// Applies fn(data, len, chunk) to every chunk that `wanted` accepts.
template <typename Wanted, typename Fn>
void rewrite(const TensorList& list, Wanted&& wanted, Fn&& fn) {
  for_each_chunk(list, [&](int64_t, const Chunk& chunk) {
    if (!wanted(chunk)) return;
    visit_chunk(list.spans()[chunk.tensor], chunk, TensorList::Access::kWrite,
                [&](auto* data) { fn(data, chunk.len, chunk); });
  });
}

}  // namespace

void scale_rows(const TensorList& grads, const double* coefs) {
  if (std::all_of(coefs, coefs + grads.num_rows(), [](double coef) { return coef == kKeep; })) {
    return;
  }
  const bool avx2 = use_avx2();
  rewrite(
      grads, [&](const Chunk& chunk) { return coefs[chunk.row] != kKeep; },
      [&](auto* data, int64_t len, const Chunk& chunk) {
        scale_chunk(data, len, coefs[chunk.row], avx2);
      });
}

void zero_nonfinite_spans(const TensorList& grads, const GradStats* rows) {
  rewrite(
      grads,
      [&](const Chunk& chunk) { return rows[chunk.tensor].nan + rows[chunk.tensor].inf > 0.0; },
      [](auto* data, int64_t len, const Chunk&) {
        for (int64_t i = 0; i < len; ++i) zero_one_if_nonfinite(data[i]);
      });
}

void scale_(const std::vector<Tensor>& grads, Tensor coefs) {
  const TensorList list(grads, TensorList::Access::kWrite, "scale_", "grads");
  STD_TORCH_CHECK(coefs.scalar_type() == torch::headeronly::ScalarType::Double &&
                      coefs.is_contiguous() && coefs.numel() == static_cast<int64_t>(grads.size()),
                  "zclip::scale_: coefs: expected a contiguous float64 tensor with one element per "
                  "gradient (",
                  grads.size(), "), got ", coefs.numel());
  scale_rows(list, static_cast<const double*>(coefs.const_data_ptr()));
}

void zero_nonfinite_(const std::vector<Tensor>& grads, Tensor stats) {
  const TensorList list(grads, TensorList::Access::kWrite, "zero_nonfinite_", "grads");
  STD_TORCH_CHECK(stats.scalar_type() == torch::headeronly::ScalarType::Double &&
                      stats.is_contiguous() &&
                      stats.numel() == static_cast<int64_t>(grads.size()) * kNumStats,
                  "zclip::zero_nonfinite_: stats: expected a contiguous float64 tensor of shape [",
                  grads.size(), ", 3], got ", stats.numel(), " elements");
  zero_nonfinite_spans(list, static_cast<const GradStats*>(stats.const_data_ptr()));
}

void clamp_(const std::vector<Tensor>& grads, double limit) {
  const TensorList list(grads, TensorList::Access::kWrite, "clamp_", "grads");
  const bool avx2 = use_avx2();
  rewrite(
      list, [](const Chunk&) { return true; },
      [&](auto* data, int64_t len, const Chunk&) {
        using value_t = decltype(widen(*data));
        auto rounded = *data;
        narrow(static_cast<value_t>(limit), &rounded);
        clamp_chunk(data, len, widen(rounded), avx2);
      });
}

}  // namespace zclip::cpu
