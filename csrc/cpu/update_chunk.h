// One update over a chunk of a tensor: load and scale the gradient, update block by block, store,
// and note what the telemetry wants. 16-bit parameters are widened into a buffer in the first-level
// cache; their moments are float32.

#pragma once

#include <cmath>

#include "../math/scale.h"
#include "tensor_list.h"
#include "update_block.h"

namespace zclip::cpu {

// What an update of one chunk found. Patterns of 32-bit and 16-bit numbers are summed modulo 2^32.
struct UpdateSlot {
  double weight_sumsq;
  double update_sumsq;
  double bad[3];
  uint64_t loaded[3];
  uint64_t stored[3];
};

// A chunk of a tensor and of its state.
struct ChunkUpdate {
  Loop loop;
  int64_t len;
  char* p;
  Format param_format;
  const char* g;
  Format grad_format;
  void* m;  // these three in the format of the arithmetic, or null
  void* v;
  void* largest;
  double coef;  // of the gradient, with its sign
  bool drops_nonfinite;
  bool stochastic;
  uint32_t key;   // of stochastic rounding
  int64_t first;  // number of the chunk's first element in its tensor
};

// As widen() and narrow() of math/number.h, bit for bit, without branches: a loop of these becomes
// vector code. A float16 is a float32 whose exponent is 112 too small.
ZCLIP_ALWAYS_INLINE float widen_flat(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t finite = bits_of(float_of(magnitude) * 5.192296858534828e33f);  // 2^112
  const uint32_t special = magnitude | 0x7f800000u;
  return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

ZCLIP_ALWAYS_INLINE void narrow_flat(float x, Float16* to) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t finite = magnitude >= 0x38800000u ? normal : subnormal;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t special = magnitude > 0x7f800000u ? nan : 0x7c00u;
  to->bits = static_cast<uint16_t>(sign | (magnitude >= 0x47800000u ? special : finite));
}

ZCLIP_ALWAYS_INLINE float widen_flat(Bfloat16 x) { return widen(x); }
ZCLIP_ALWAYS_INLINE void narrow_flat(float x, Bfloat16* to) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const uint32_t chosen = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : rounded;
  to->bits = static_cast<uint16_t>(chosen >> 16);
}

ZCLIP_ALWAYS_INLINE float widen_flat(float x) { return x; }
ZCLIP_ALWAYS_INLINE double widen_flat(double x) { return x; }

// Calls visit with a typed pointer to element `begin`.
template <typename Visit>
ZCLIP_ALWAYS_INLINE void visit_block(Format format, const char* data, int64_t begin,
                                     Visit&& visit) {
  const char* at = data + begin * bytes_per_element(format);
  switch (format) {
    case Format::kFloat32:
      return visit(reinterpret_cast<const float*>(at));
    case Format::kBfloat16:
      return visit(reinterpret_cast<const Bfloat16*>(at));
    case Format::kFloat16:
      return visit(reinterpret_cast<const Float16*>(at));
    default:
      return visit(reinterpret_cast<const double*>(at));
  }
}

// Whether float32 would hold a coefficient badly.
inline bool is_tiny(double coef) { return std::fabs(coef) < kSmallestNormalFloat && coef != 0.0; }

// Loads a gradient as the update sees it: scaled, and with the decay that goes through it.
template <typename value_t>
ZCLIP_ALWAYS_INLINE void load_gradient(const ChunkUpdate& chunk, int64_t start, int64_t len,
                                       const value_t* p, value_t l2, value_t* __restrict g) {
  const double coef = chunk.coef;
  const auto factor = static_cast<value_t>(coef);
  visit_block(chunk.grad_format, chunk.g, start, [&](const auto* from) {
    if (is_tiny(coef)) {
      for (int64_t i = 0; i < len; ++i) {
        g[i] = static_cast<value_t>(static_cast<double>(widen(from[i])) * coef);
      }
    } else {
      for (int64_t i = 0; i < len; ++i) g[i] = static_cast<value_t>(widen_flat(from[i])) * factor;
    }
    if (chunk.drops_nonfinite) {
      for (int64_t i = 0; i < len; ++i) {
        if (!is_finite(widen(from[i]))) g[i] = value_t{};
      }
    }
  });
  if (l2 != value_t{}) {
    for (int64_t i = 0; i < len; ++i) g[i] = g[i] + l2 * p[i];
  }
}

template <typename number_t>
ZCLIP_ALWAYS_INLINE uint32_t pattern_sum(const number_t* data, int64_t len) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < len; ++i) sum += static_cast<uint32_t>(pattern_of(data[i]));
  return sum;
}

template <typename number_t>
ZCLIP_ALWAYS_INLINE uint32_t load_narrow(const number_t* from, int64_t len, float* __restrict to) {
  for (int64_t i = 0; i < len; ++i) to[i] = widen_flat(from[i]);
  return pattern_sum(from, len);
}

// Rounds the parameters to their own format, leaves them as rounded in `wide` too, and returns the
// sum of what was stored.
template <typename number_t>
ZCLIP_ALWAYS_INLINE uint32_t store_narrow(const ChunkUpdate& chunk, int64_t start, int64_t len,
                                          float* __restrict wide, number_t* __restrict to) {
  bool done = false;
  if constexpr (std::is_same_v<number_t, Bfloat16>) {
    if (chunk.stochastic) {
      for (int64_t i = 0; i < len; ++i) {
        const auto element = static_cast<uint32_t>(chunk.first + start + i);
        narrow_stochastically(wide[i], random_bits(chunk.key, element), to + i);
      }
      done = true;
    }
  }
  if (!done) {
    for (int64_t i = 0; i < len; ++i) narrow_flat(wide[i], to + i);
  }
  return load_narrow(to, len, wide);
}

inline double count_bad(Format format, const void* data, int64_t len) {
  double bad = 0.0;
  visit_block(format, static_cast<const char*>(data), 0, [&](const auto* numbers) {
    for (int64_t i = 0; i < len; ++i) bad += is_finite(widen(numbers[i])) ? 0.0 : 1.0;
  });
  return bad;
}

// Returns what the telemetry wants; zeros if kTelemetry is false.
template <bool kTelemetry, typename value_t>
ZCLIP_ALWAYS_INLINE UpdateSlot update_chunk(const ChunkUpdate& chunk,
                                            const UpdateScalars<value_t>& s) {
  using word_t = Word<value_t>;
  constexpr Format kOwn = sizeof(value_t) == 8 ? Format::kFloat64 : Format::kFloat32;
  const bool is_narrow = chunk.param_format != kOwn;
  alignas(64) value_t gradient[kUpdateBlock], update[kUpdateBlock], wide[kUpdateBlock];
  auto* const m = static_cast<value_t*>(chunk.m);
  auto* const v = static_cast<value_t*>(chunk.v);
  auto* const largest = static_cast<value_t*>(chunk.largest);
  Seen<value_t> seen;
  uint32_t narrow_loaded = 0, narrow_stored = 0;
  const bool scales_on_load = chunk.grad_format == kOwn && !chunk.drops_nonfinite &&
                              s.l2 == value_t{} && !is_tiny(chunk.coef);
  for (int64_t start = 0; start < chunk.len; start += kUpdateBlock) {
    const int64_t len = std::min(kUpdateBlock, chunk.len - start);
    value_t* weight = reinterpret_cast<value_t*>(chunk.p) + start;
    if constexpr (sizeof(value_t) == 4) {
      if (is_narrow) {
        weight = wide;
        char* at = chunk.p + 2 * start;
        narrow_loaded += chunk.param_format == Format::kBfloat16
                             ? load_narrow(reinterpret_cast<Bfloat16*>(at), len, wide)
                             : load_narrow(reinterpret_cast<Float16*>(at), len, wide);
      }
    }
    const value_t* source = gradient;
    if (scales_on_load) {
      source = reinterpret_cast<const value_t*>(chunk.g) + start;
    } else {
      load_gradient(chunk, start, len, weight, s.l2, gradient);
    }
    const Block<value_t> block = {weight,
                                  source,
                                  m == nullptr ? nullptr : m + start,
                                  v == nullptr ? nullptr : v + start,
                                  largest == nullptr ? nullptr : largest + start,
                                  update,
                                  scales_on_load ? static_cast<value_t>(chunk.coef) : value_t{1},
                                  len,
                                  is_narrow};
    update_block<kTelemetry>(chunk.loop, block, s, seen);
    if constexpr (sizeof(value_t) == 4) {
      if (is_narrow) {
        char* at = chunk.p + 2 * start;
        narrow_stored +=
            chunk.param_format == Format::kBfloat16
                ? store_narrow(chunk, start, len, wide, reinterpret_cast<Bfloat16*>(at))
                : store_narrow(chunk, start, len, wide, reinterpret_cast<Float16*>(at));
        if (kTelemetry) add_rounded(wide, len, seen);
      }
    }
  }
  UpdateSlot slot = {};
  if (!kTelemetry) return slot;
  if (is_narrow) {
    seen.loaded[0] = narrow_loaded;
    seen.stored[0] = narrow_stored;
  }
  slot.weight_sumsq = fold(seen.weights);
  slot.update_sumsq = fold(seen.updates);
  // A moment that is not finite makes an update that is not, but for an infinite second moment,
  // which makes it zero, and for Lion, which takes the sign.
  const bool is_high = seen.alarm >> (8 * sizeof(word_t) - 1) != 0;
  const void* stored[3] = {chunk.p, chunk.m, chunk.v};
  const bool suspect[3] = {seen.suspects_weights || seen.suspects_updates,
                           seen.suspects_updates || is_high, seen.suspects_updates || is_high};
  for (int k = 0; k < 3; ++k) {
    slot.loaded[k] = seen.loaded[k];
    slot.stored[k] = seen.stored[k];
    if (suspect[k] && stored[k] != nullptr) {
      slot.bad[k] = count_bad(k == 0 ? chunk.param_format : kOwn, stored[k], chunk.len);
    }
  }
  return slot;
}

}  // namespace zclip::cpu
