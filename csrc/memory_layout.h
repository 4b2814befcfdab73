// How a tensor lies in memory and what its numbers are, as both compiled backends ask it.

#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "math/number.h"

namespace zclip {

struct Layout {
  bool dense;
  bool overlaps;  // some element is another's memory, as after expand()
};

// Walks the dimensions from the smallest stride up. Memory is dense if each stride is the size of
// everything inside it.
inline Layout layout_of(int64_t dim, const int64_t* sizes, const int64_t* strides) {
  std::vector<int64_t> order(dim);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  int64_t inside = 1;
  Layout layout = {true, false};
  for (const int64_t d : order) {
    if (sizes[d] == 1) continue;
    layout.dense &= strides[d] == inside;
    layout.overlaps |= strides[d] < inside;
    inside = std::max(inside, strides[d]) * sizes[d];
  }
  return layout;
}

inline bool find_format(torch::headeronly::ScalarType type, Format* format) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Float:
      *format = Format::kFloat32;
      return true;
    case ScalarType::BFloat16:
      *format = Format::kBfloat16;
      return true;
    case ScalarType::Half:
      *format = Format::kFloat16;
      return true;
    case ScalarType::Double:
      *format = Format::kFloat64;
      return true;
    default:
      return false;
  }
}

}  // namespace zclip
