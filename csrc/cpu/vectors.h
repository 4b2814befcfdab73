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
struct PowersOfPack {
  static ZCLIP_ALWAYS_INLINE void square(pack_t* x) { *x = *x * *x; }
  static ZCLIP_ALWAYS_INLINE void take_root(pack_t* x) {
    value_t lanes[sizeof(pack_t) / sizeof(value_t)];
    std::memcpy(lanes, x, sizeof lanes);
    for (value_t& lane : lanes) Powers<value_t>::take_root(&lane);
    std::memcpy(x, lanes, sizeof lanes);
  }
};

template <>
struct Powers<Pack<float, 8>> : PowersOfPack<Pack<float, 8>, float> {};
template <>
struct Powers<Pack<double, 8>> : PowersOfPack<Pack<double, 8>, double> {};
template <>
struct Powers<Pack<float, 16>> : PowersOfPack<Pack<float, 16>, float> {
  // A square that rounds to zero takes the hardware several times as long as that of zero itself,
  // so numbers up to 2^-75 become zeros first. In AVX-512 that is free; with the 16 registers of
  // AVX2 it would make every step a tenth longer. The comparison is one of integers, because GCC
  // splits one of floats into its lanes here.
  static ZCLIP_ALWAYS_INLINE void square(Pack<float, 16>* x) {
    constexpr int32_t kMagnitude = 0x7fffffff, kSquareIsZero = 0x1a000000;
    Pack<int32_t, 16> bits;
    std::memcpy(&bits, x, sizeof bits);
    bits &= (bits & kMagnitude) > kSquareIsZero;
    Pack<float, 16> kept;
    std::memcpy(&kept, &bits, sizeof kept);
    *x = kept * kept;
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
