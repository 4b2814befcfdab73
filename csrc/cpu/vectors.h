// Several numbers at a time, as the compiler's own vectors, which have all operators but one.

#pragma once

#include <math.h>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../math/optim.h"
#include "cpu_path.h"

namespace zclip {

template <typename number_t, int kWidth>
struct PackOf {
  typedef number_t type __attribute__((vector_size(kWidth * sizeof(number_t))));
};
template <typename number_t, int kWidth>
using Pack = typename PackOf<number_t, kWidth>::type;

template <typename value_t>
using Word = std::conditional_t<sizeof(value_t) == 8, uint64_t, uint32_t>;

template <typename pack_t, typename number_t>
ZCLIP_ALWAYS_INLINE pack_t load_pack(const number_t* from) {
  pack_t loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

template <typename pack_t, typename number_t>
ZCLIP_ALWAYS_INLINE void store_pack(number_t* to, const pack_t& pack) {
  std::memcpy(to, &pack, sizeof pack);
}

template <typename pack_t, typename value_t>
ZCLIP_ALWAYS_INLINE void take_roots(pack_t* x) {
  constexpr int kWidth = sizeof(pack_t) / sizeof(value_t);
  value_t lanes[kWidth];
  std::memcpy(lanes, x, sizeof lanes);
  for (value_t& lane : lanes) SquareRoot<value_t>::take(&lane);
  std::memcpy(x, lanes, sizeof lanes);
}

template <>
struct SquareRoot<Pack<float, 8>> {
  static ZCLIP_ALWAYS_INLINE void take(Pack<float, 8>* x) { take_roots<Pack<float, 8>, float>(x); }
};
template <>
struct SquareRoot<Pack<float, 16>> {
  static ZCLIP_ALWAYS_INLINE void take(Pack<float, 16>* x) {
    take_roots<Pack<float, 16>, float>(x);
  }
};
template <>
struct SquareRoot<Pack<double, 8>> {
  static ZCLIP_ALWAYS_INLINE void take(Pack<double, 8>* x) {
    take_roots<Pack<double, 8>, double>(x);
  }
};

// As UpdateScalars of numbers, each of them in all lanes.
template <typename pack_t, typename value_t>
ZCLIP_ALWAYS_INLINE UpdateScalars<pack_t> spread(const UpdateScalars<value_t>& s) {
  const pack_t zero = {};
  return {s.rate - zero,    s.decay - zero, s.l2 - zero,   s.weight1 - zero,
          s.weight2 - zero, s.eps - zero,   s.root - zero, s.momentum - zero,
          s.keep - zero,    s.give - zero,  s.one - zero,  s.least - zero};
}

}  // namespace zclip
