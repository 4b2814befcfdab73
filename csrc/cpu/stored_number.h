// Parameters as they lie in memory and as the arithmetic sees them, one at a time or several: the
// same text serves a number and a vector of them. As widen() and narrow() of math/number.h, bit for
// bit, without branches.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../math/number.h"
#include "../math/optim.h"
#include "vectors.h"

// gcc has it since 12.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define ZCLIP_HAS_SHUFFLE 1
#endif
#endif
#ifndef ZCLIP_HAS_SHUFFLE
#define ZCLIP_HAS_SHUFFLE 0
#endif

namespace zclip::cpu {

// A bfloat16 that is rounded up or down at random.
struct RandomBfloat16 : Bfloat16 {};

// What a rounding at random depends on.
struct RandomBits {
  uint32_t key;
  uint32_t element;  // its number in its tensor

  RandomBits operator+(int64_t i) const { return {key, element + static_cast<uint32_t>(i)}; }
};

template <typename to_t, typename from_t>
ZCLIP_ALWAYS_INLINE to_t bits_as(const from_t& from) {
  static_assert(sizeof(to_t) == sizeof(from_t), "as many bits");
  to_t to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <typename value_t, typename words_t>
ZCLIP_ALWAYS_INLINE value_t widened(const words_t& bits, Bfloat16) {
  return bits_as<value_t>(bits << 16);
}

// A float16 is a float32 whose exponent is 112 too small.
template <typename value_t, typename words_t>
ZCLIP_ALWAYS_INLINE value_t widened(const words_t& bits, Float16) {
  const words_t sign = (bits & 0x8000u) << 16, magnitude = (bits & 0x7fffu) << 13;
  const words_t finite = bits_as<words_t>(bits_as<value_t>(magnitude) * 5.192296858534828e33f);
  const words_t special = magnitude | 0x7f800000u;
  return bits_as<value_t>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// A NaN that arithmetic made is quiet: without its last bits it is still one, and adding to them
// could make it something else.
template <typename words_t, typename value_t>
ZCLIP_ALWAYS_INLINE words_t narrowed(const value_t& x, RandomBits, Bfloat16) {
  const words_t bits = bits_as<words_t>(x), magnitude = bits & 0x7fffffffu, none = bits & 0u;
  const words_t half = ((bits >> 16) & 1u) + 0x7fffu;
  return (bits + (magnitude > 0x7f800000u ? none : half)) >> 16;
}

template <typename words_t, typename value_t>
ZCLIP_ALWAYS_INLINE words_t narrowed(const value_t& x, RandomBits, Float16) {
  const words_t bits = bits_as<words_t>(x);
  const words_t sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const words_t normal = (magnitude - (0x38000000u - 0xfffu) + ((magnitude >> 13) & 1u)) >> 13;
  const words_t subnormal = bits_as<words_t>(bits_as<value_t>(magnitude) + 0.5f) - 0x3f000000u;
  const words_t finite = magnitude >= 0x38800000u ? normal : subnormal;
  const words_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu), infinite = (nan & 0u) | 0x7c00u;
  const words_t special = magnitude > 0x7f800000u ? nan : infinite;
  return sign | (magnitude >= 0x47800000u ? special : finite);
}

// As narrow_stochastically(); `from` is that of the first number.
template <typename words_t, typename value_t>
ZCLIP_ALWAYS_INLINE words_t narrowed(const value_t& x, RandomBits from, RandomBfloat16) {
  uint32_t elements[sizeof(words_t) / sizeof(uint32_t)];
  for (uint32_t& each : elements) each = from.element++;
  words_t random;
  std::memcpy(&random, elements, sizeof random);
  random = random_bits(from.key, random);
  const words_t bits = bits_as<words_t>(x), magnitude = bits & 0x7fffffffu;
  const words_t cut = (bits + (random & 0xffffu)) >> 16;
  return magnitude >= 0x7f800000u ? narrowed<words_t>(x, from, Bfloat16{}) : cut;
}

template <typename number_t>
constexpr bool kIsNarrow =
    std::is_base_of_v<Bfloat16, number_t> || std::is_same_v<number_t, Float16>;

// As many words of 16 bits, each with 16 zeros above. Written as a shuffle because gcc makes five
// instructions of a conversion.
template <typename words_t, typename number_t>
ZCLIP_ALWAYS_INLINE words_t extended(const number_t* from) {
  constexpr int kWidth = sizeof(words_t) / sizeof(uint32_t);
  const auto x = load_pack<Pack<uint16_t, kWidth>>(from);
#if ZCLIP_HAS_SHUFFLE
  const Pack<uint16_t, kWidth> o = {};
  if constexpr (kWidth == 8) {
    return (words_t)__builtin_shufflevector(x, o, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7,
                                            15);
  } else {
    return (words_t)__builtin_shufflevector(x, o, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                            7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                            30, 15, 31);
  }
#else
  return __builtin_convertvector(x, words_t);
#endif
}

// Loads one number, or as many as value_t holds, and their patterns.
template <typename value_t, typename number_t, typename words_t>
ZCLIP_ALWAYS_INLINE value_t load_number(const number_t* from, words_t* bits) {
  if constexpr (!kIsNarrow<number_t>) {
    const auto loaded = load_pack<value_t>(from);
    *bits = bits_as<words_t>(loaded);
    return loaded;
  } else {
    if constexpr (std::is_same_v<value_t, float>) {
      *bits = from->bits;
    } else {
      *bits = extended<words_t>(from);
    }
    return widened<value_t>(*bits, number_t{});
  }
}

// Rounds and stores, and returns what was stored, with its patterns.
template <typename value_t, typename number_t, typename words_t>
ZCLIP_ALWAYS_INLINE value_t store_number(const value_t& x, RandomBits random, number_t* to,
                                         words_t* bits) {
  if constexpr (!kIsNarrow<number_t>) {
    *bits = bits_as<words_t>(x);
    store_pack(to, x);
    return x;
  } else {
    *bits = narrowed<words_t>(x, random, number_t{});
    if constexpr (std::is_same_v<value_t, float>) {
      to->bits = static_cast<uint16_t>(*bits);
    } else {
      constexpr int kWidth = sizeof(words_t) / sizeof(uint32_t);
      store_pack(to, __builtin_convertvector(*bits, Pack<uint16_t, kWidth>));
    }
    return widened<value_t>(*bits, number_t{});
  }
}

// One number, without branches.
ZCLIP_ALWAYS_INLINE float widen_flat(float x) { return x; }
ZCLIP_ALWAYS_INLINE double widen_flat(double x) { return x; }
ZCLIP_ALWAYS_INLINE float widen_flat(Bfloat16 x) { return widen(x); }
ZCLIP_ALWAYS_INLINE float widen_flat(Float16 x) {
  return widened<float>(static_cast<uint32_t>(x.bits), x);
}

}  // namespace zclip::cpu
