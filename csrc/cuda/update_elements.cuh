// What one thread does to its elements of a chunk in an optimizer update: load, update, store, and
// note what the telemetry wants. No thread reads what another wrote.

#pragma once

#include <cstring>
#include <type_traits>

#include "../math/grad_stats.h"
#include "../math/optim.h"
#include "../math/scale.h"
#include "block_join.cuh"
#include "device_tensor.h"

namespace zclip::cuda {

// Elements that a thread loads at once: 16 bytes of the arithmetic's own format.
template <typename number_t>
constexpr int kUpdateWidth = sizeof(number_t) == 8 ? 2 : 4;
constexpr int kNumPatterns = 6;  // sums of those of weights and moments, loaded and stored

// What one thread found in its part of a chunk, in as few registers as hold it.
template <typename value_t>
struct ThreadSums {
  double weights = 0.0;  // squares
  double updates = 0.0;
  uint32_t bad = 0;  // three counts of kBadBits bits: weights, firsts and seconds
  decltype(bits_of(value_t{})) words[kNumPatterns] = {};
};
constexpr int kBadBits = 10;
static_assert(kDeviceChunk / kThreads < 1 << kBadBits, "a thread can count its elements");

// So many elements, which lie at a multiple of their size: 8 bytes of a 16-bit format, else 16.
template <typename number_t>
struct Few {
  number_t numbers[kUpdateWidth<number_t>];
};

template <typename number_t>
__device__ __forceinline__ Few<number_t> load_few(const number_t* from) {
  using bits_t = std::conditional_t<sizeof(number_t) == 2, uint2, uint4>;
  Few<number_t> few;
  static_assert(sizeof few == sizeof(bits_t), "one load");
  const bits_t bits = *reinterpret_cast<const bits_t*>(from);
  memcpy(&few, &bits, sizeof bits);
  return few;
}

// One store of 16 bytes: out of an assignment nvcc makes two of 8. Nothing in a launch reads what
// it stored.
__device__ __forceinline__ void store_words(void* to, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(a), "r"(b), "r"(c), "r"(d));
#else
  *static_cast<uint4*>(to) = {a, b, c, d};
#endif
}

template <typename number_t>
__device__ __forceinline__ void store_few(number_t* to, const Few<number_t>& few) {
  const number_t(&x)[kUpdateWidth<number_t>] = few.numbers;
  if constexpr (sizeof(number_t) == 2) {
    *reinterpret_cast<uint2*>(to) = {x[0].bits | static_cast<uint32_t>(x[1].bits) << 16,
                                     x[2].bits | static_cast<uint32_t>(x[3].bits) << 16};
  } else if constexpr (sizeof(number_t) == 4) {
    store_words(to, bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3]));
  } else {
    const uint64_t low = bits_of(x[0]), high = bits_of(x[1]);
    store_words(to, static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
  }
}

// Returns the sum of the patterns.
template <int kCount, typename number_t, typename value_t>
__device__ __forceinline__ auto load_wide(const char* data, int i,
                                          value_t (&to)[kUpdateWidth<value_t>]) {
  const auto* from = reinterpret_cast<const number_t*>(data) + i;
  Few<number_t> few = {};
  if constexpr (kCount == 1) {
    few.numbers[0] = *from;
  } else {
    few = load_few(from);
  }
  decltype(bits_of(value_t{})) sum = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    to[k] = static_cast<value_t>(widen(few.numbers[k]));
    sum += static_cast<decltype(sum)>(pattern_of(few.numbers[k]));
  }
  return sum;
}

template <int kCount, typename number_t>
__device__ __forceinline__ void store_all(char* data, int i, const Few<number_t>& few) {
  auto* to = reinterpret_cast<number_t*>(data) + i;
  if constexpr (kCount == 1) {
    *to = few.numbers[0];
  } else {
    store_few(to, few);
  }
}

// Returns the sum of the patterns.
template <int kCount, typename value_t>
__device__ __forceinline__ auto store_state(char* data, int i,
                                            const value_t (&from)[kUpdateWidth<value_t>]) {
  Few<value_t> few = {};
  decltype(bits_of(value_t{})) sum = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    few.numbers[k] = from[k];
    sum += pattern_of(from[k]);
  }
  store_all<kCount>(data, i, few);
  return sum;
}

// How a parameter is rounded to its format. `element` is the number of a thread's first.
struct Rounding {
  bool stochastic;
  uint32_t key;
  uint32_t element;
};

// Rounds to the parameter's format, stores, and leaves the rounded values behind. Returns the sum
// of the patterns.
template <int kCount, typename number_t, typename value_t>
__device__ __forceinline__ auto store_param(char* data, int i, const Rounding& rounding,
                                            value_t (&values)[kUpdateWidth<value_t>]) {
  Few<number_t> few = {};
  decltype(bits_of(value_t{})) sum = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    narrow(values[k], &few.numbers[k]);
    if constexpr (std::is_same_v<number_t, Bfloat16>) {
      if (rounding.stochastic) {
        const uint32_t random = random_bits(rounding.key, rounding.element + k);
        narrow_stochastically(values[k], random, &few.numbers[k]);
      }
    }
    sum += static_cast<decltype(sum)>(pattern_of(few.numbers[k]));
    values[k] = widen(few.numbers[k]);
  }
  store_all<kCount>(data, i, few);
  return sum;
}

// The formats of a parameter and of its gradient: known to the compiler, so that all loads of a
// thread are under way before the first is used, or found out at every step.
template <typename number_t>
struct BothAre {
  template <int kCount, typename value_t>
  __device__ __forceinline__ void load_grad(const char* data, int i,
                                            value_t (&to)[kUpdateWidth<value_t>]) const {
    load_wide<kCount, number_t>(data, i, to);
  }
  template <int kCount, typename value_t>
  __device__ __forceinline__ auto load_param(const char* data, int i,
                                             value_t (&to)[kUpdateWidth<value_t>]) const {
    return load_wide<kCount, number_t>(data, i, to);
  }
  template <int kCount, typename value_t>
  __device__ __forceinline__ auto store(char* data, int i, const Rounding& rounding,
                                        value_t (&values)[kUpdateWidth<value_t>]) const {
    return store_param<kCount, number_t>(data, i, rounding, values);
  }
};

// Of float32 arithmetic.
struct AnyFormats {
  Format param;
  Format grad;

  template <int kCount>
  static __device__ __forceinline__ uint32_t load(Format format, const char* data, int i,
                                                  float (&to)[kUpdateWidth<float>]) {
    switch (format) {
      case Format::kBfloat16:
        return load_wide<kCount, Bfloat16>(data, i, to);
      case Format::kFloat16:
        return load_wide<kCount, Float16>(data, i, to);
      default:
        return load_wide<kCount, float>(data, i, to);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void load_grad(const char* data, int i,
                                            float (&to)[kUpdateWidth<float>]) const {
    load<kCount>(grad, data, i, to);
  }
  template <int kCount>
  __device__ __forceinline__ uint32_t load_param(const char* data, int i,
                                                 float (&to)[kUpdateWidth<float>]) const {
    return load<kCount>(param, data, i, to);
  }
  template <int kCount>
  __device__ __forceinline__ uint32_t store(char* data, int i, const Rounding& rounding,
                                            float (&values)[kUpdateWidth<float>]) const {
    switch (param) {
      case Format::kBfloat16:
        return store_param<kCount, Bfloat16>(data, i, rounding, values);
      case Format::kFloat16:
        return store_param<kCount, Float16>(data, i, rounding, values);
      default:
        return store_param<kCount, float>(data, i, rounding, values);
    }
  }
};

// The work of one chunk that is the same for all its elements.
template <typename value_t>
struct ChunkWork {
  UpdateScalars<value_t> scalars;
  double coef;
  uint32_t key;
  int flags;
};

// A chunk of a tensor: where it lies, and the number of its first element.
struct UpdatePlace {
  char* p;
  const char* g;
  char* m;
  char* v;
  char* largest;
  uint32_t first;
};

template <int kCount, typename value_t>
__device__ __forceinline__ void scale_gradient(const ChunkWork<value_t>& work,
                                               const value_t (&p)[kUpdateWidth<value_t>],
                                               value_t (&g)[kUpdateWidth<value_t>]) {
  const bool is_tiny = fabs(work.coef) < kSmallestNormalFloat && work.coef != 0.0;
  const bool drops = (work.flags & kDropNonFinite) != 0;
  if (is_tiny || drops) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const auto scaled = static_cast<value_t>(static_cast<double>(g[k]) * work.coef);
      const value_t plain = g[k] * static_cast<value_t>(work.coef);
      g[k] = drops && !is_finite(g[k]) ? value_t{} : is_tiny ? scaled : plain;
    }
  } else {
    const auto coef = static_cast<value_t>(work.coef);
#pragma unroll
    for (int k = 0; k < kCount; ++k) g[k] = g[k] * coef;
  }
  if (work.scalars.l2 != value_t{}) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) g[k] = g[k] + work.scalars.l2 * p[k];
  }
}

// Adds kCount squares: quickly in their own format, or in float64 where that cannot be believed.
// Returns whether one of the numbers may be NaN or Inf.
template <int kCount, typename value_t>
__device__ __forceinline__ bool add_squares(const value_t (&x)[kUpdateWidth<value_t>],
                                            double& sum) {
  value_t quick = x[0] * x[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) quick += x[k] * x[k];
  if (trustworthy<value_t>(quick)) {
    sum += quick;
    return false;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const double wide = is_finite(x[k]) ? static_cast<double>(x[k]) : 0.0;
    sum += wide * wide;
  }
  return !is_finite(quick);
}

template <int kCount, typename value_t>
__device__ __forceinline__ uint32_t count_bad(const value_t (&x)[kUpdateWidth<value_t>]) {
  uint32_t bad = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) bad += is_finite(x[k]) ? 0 : 1;
  return bad;
}

// Whether one of them is NaN or Inf.
template <int kCount, typename value_t>
__device__ __forceinline__ bool any_bad(const value_t (&x)[kUpdateWidth<value_t>]) {
  constexpr auto kMagnitude = ~decltype(bits_of(value_t{})){} >> 1;
  auto most = bits_of(x[0]) & kMagnitude;
#pragma unroll
  for (int k = 1; k < kCount; ++k) most = Largest::join(most, bits_of(x[k]) & kMagnitude);
  return most >= kInfinite<value_t>;
}

// kCount elements from number i of the chunk on.
template <int kCount, Loop kLoop, typename Formats, typename value_t>
__device__ __forceinline__ void update_elements(const Formats& formats, const UpdatePlace& at,
                                                const ChunkWork<value_t>& work, bool telemetry,
                                                int i, ThreadSums<value_t>& sums) {
  using Traits = LoopTraits<kLoop>;
  value_t g[kUpdateWidth<value_t>], p[kUpdateWidth<value_t>], change[kUpdateWidth<value_t>];
  value_t m[kUpdateWidth<value_t>] = {}, v[kUpdateWidth<value_t>] = {},
          largest[kUpdateWidth<value_t>] = {};
  formats.template load_grad<kCount>(at.g, i, g);
  sums.words[0] += formats.template load_param<kCount>(at.p, i, p);
  if (Traits::kHasFirst) sums.words[1] += load_wide<kCount, value_t>(at.m, i, m);
  if (Traits::kHasSecond) sums.words[2] += load_wide<kCount, value_t>(at.v, i, v);
  if (Traits::kHasMaximum) load_wide<kCount, value_t>(at.largest, i, largest);
  scale_gradient<kCount>(work, p, g);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    change[k] = loop_update<kLoop>(g[k], p[k], m[k], v[k], largest[k], work.scalars);
    p[k] = p[k] - change[k];
  }
  const Rounding rounding = {(work.flags & kStochastic) != 0, work.key, at.first + i};
  sums.words[3] += formats.template store<kCount>(at.p, i, rounding, p);
  if (Traits::kHasFirst) sums.words[4] += store_state<kCount>(at.m, i, m);
  if (Traits::kHasSecond) sums.words[5] += store_state<kCount>(at.v, i, v);
  if (Traits::kHasMaximum) store_state<kCount>(at.largest, i, largest);
  if (!telemetry) return;
  // A moment that is not finite makes an update that is not, but for an infinite second moment,
  // which makes it zero, and for Lion, which takes the sign.
  bool suspects = add_squares<kCount>(p, sums.weights);
  suspects |= add_squares<kCount>(change, sums.updates);
  if (Traits::kWatched == Watched::kFirst) suspects |= any_bad<kCount>(m);
  if (Traits::kWatched == Watched::kSecond) suspects |= any_bad<kCount>(v);
  if (suspects) {
    sums.bad += count_bad<kCount>(p) | count_bad<kCount>(m) << kBadBits |
                count_bad<kCount>(v) << 2 * kBadBits;
  }
}

// One chunk in one loop: several elements at a time while they lie so that a thread can load them
// at once, then one at a time.
template <Loop kLoop, typename Formats, typename value_t>
__device__ __forceinline__ void update_with(const Formats& formats, const UpdatePlace& at,
                                            const ChunkWork<value_t>& work, bool telemetry,
                                            int whole, int len, ThreadSums<value_t>& sums) {
  constexpr int kWidth = kUpdateWidth<value_t>;
  for (int i = static_cast<int>(threadIdx.x) * kWidth; i < whole; i += kThreads * kWidth) {
    update_elements<kWidth, kLoop>(formats, at, work, telemetry, i, sums);
  }
  for (int i = whole + static_cast<int>(threadIdx.x); i < len; i += kThreads) {
    update_elements<1, kLoop>(formats, at, work, telemetry, i, sums);
  }
}

template <typename Formats, typename value_t>
__device__ __forceinline__ void update_in(Loop loop, const Formats& formats, const UpdatePlace& at,
                                          const ChunkWork<value_t>& work, bool telemetry, int whole,
                                          int len, ThreadSums<value_t>& sums) {
  switch (loop) {
    case Loop::kAdam:
      return update_with<Loop::kAdam>(formats, at, work, telemetry, whole, len, sums);
    case Loop::kAmsgrad:
      return update_with<Loop::kAmsgrad>(formats, at, work, telemetry, whole, len, sums);
    case Loop::kSgd:
      return update_with<Loop::kSgd>(formats, at, work, telemetry, whole, len, sums);
    case Loop::kMomentum:
      return update_with<Loop::kMomentum>(formats, at, work, telemetry, whole, len, sums);
    case Loop::kNesterov:
      return update_with<Loop::kNesterov>(formats, at, work, telemetry, whole, len, sums);
    default:
      return update_with<Loop::kLion>(formats, at, work, telemetry, whole, len, sums);
  }
}

}  // namespace zclip::cuda
