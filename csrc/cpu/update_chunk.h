// One update over a chunk of a tensor: update block by block, and note what the telemetry wants.
// Gradients in another format than the arithmetic are widened into a buffer in the first-level
// cache. 16-bit parameters have float32 moments.

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
  uint32_t key;    // of stochastic rounding
  int64_t first;   // number of the chunk's first element in its tensor
  bool is_cached;  // the step fits the caches
};

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
template <typename number_t, typename value_t>
ZCLIP_ALWAYS_INLINE void load_gradient(const ChunkUpdate& chunk, int64_t start, int64_t len,
                                       const number_t* p, value_t l2, value_t* __restrict g) {
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
    for (int64_t i = 0; i < len; ++i) g[i] = g[i] + l2 * widen_flat(p[i]);
  }
}

template <typename number_t>
ZCLIP_ALWAYS_INLINE double count_bad(const number_t* data, int64_t len) {
  double bad = 0.0;
  for (int64_t i = 0; i < len; ++i) bad += is_finite(widen_flat(data[i])) ? 0.0 : 1.0;
  return bad;
}

// Gradients that the loop widens itself: bfloat16 of bfloat16 parameters. All others that differ
// from the arithmetic are widened ahead: every loop more is compiled for each instruction set.
template <typename number_t, typename value_t>
using DirectGrad = std::conditional_t<std::is_same_v<number_t, Bfloat16>, Bfloat16, value_t>;
template <typename grad_t>
constexpr Format kFormatOf = std::is_same_v<grad_t, Bfloat16> ? Format::kBfloat16
                             : std::is_same_v<grad_t, double> ? Format::kFloat64
                                                              : Format::kFloat32;

// What updating a chunk writes besides its tensors. Both buffers fit the first-level cache.
template <typename value_t, int kWidth>
struct ChunkNotes {
  alignas(64) value_t gradient[kUpdateBlock];  // where it cannot be used as it lies
  alignas(64) value_t update[kUpdateBlock];
  Found<value_t, kWidth> found;
};

// One block of a chunk, whose gradient lies at `source`.
template <bool kTelemetry, typename number_t, int kWidth, typename grad_t, typename value_t>
ZCLIP_ALWAYS_INLINE void update_from(const grad_t* source, value_t coef, const ChunkUpdate& chunk,
                                     int64_t start, int64_t len, const UpdateScalars<value_t>& s,
                                     ChunkNotes<value_t, kWidth>& notes) {
  auto* const m = static_cast<value_t*>(chunk.m);
  auto* const v = static_cast<value_t*>(chunk.v);
  auto* const largest = static_cast<value_t*>(chunk.largest);
  const Block<number_t, grad_t, value_t> block = {
      reinterpret_cast<number_t*>(chunk.p) + start,
      source,
      m == nullptr ? nullptr : m + start,
      v == nullptr ? nullptr : v + start,
      largest == nullptr ? nullptr : largest + start,
      notes.update,
      coef,
      len,
      chunk.is_cached ? kAheadInCaches<value_t> : kAheadInMemory<value_t, number_t>,
      {chunk.key, static_cast<uint32_t>(chunk.first + start)}};
  update_block<kTelemetry, kWidth>(chunk.loop, block, s, notes.found);
}

// Returns what the telemetry wants; zeros if kTelemetry is false. number_t is the format of the
// parameter; kWidth numbers are in a vector.
template <bool kTelemetry, int kWidth, typename number_t, typename value_t>
ZCLIP_ALWAYS_INLINE UpdateSlot update_chunk_of(const ChunkUpdate& chunk,
                                               const UpdateScalars<value_t>& s) {
  using word_t = Word<value_t>;
  const auto* const p = reinterpret_cast<const number_t*>(chunk.p);
  ChunkNotes<value_t, kWidth> notes;
  using grad_t = DirectGrad<number_t, value_t>;
  const bool scales_on_load = chunk.grad_format == kFormatOf<grad_t> && !chunk.drops_nonfinite &&
                              s.l2 == value_t{} && !is_tiny(chunk.coef);
  for (int64_t start = 0; start < chunk.len; start += kUpdateBlock) {
    const int64_t len = std::min(kUpdateBlock, chunk.len - start);
    const value_t* source = notes.gradient;
    value_t coef = 1;
    if (scales_on_load) {
      coef = static_cast<value_t>(chunk.coef);
      const auto* direct = reinterpret_cast<const grad_t*>(chunk.g) + start;
      if constexpr (std::is_same_v<grad_t, value_t>) {
        source = direct;
      } else {
        update_from<kTelemetry, number_t>(direct, coef, chunk, start, len, s, notes);
        continue;
      }
    } else {
      load_gradient(chunk, start, len, p + start, s.l2, notes.gradient);
    }
    update_from<kTelemetry, number_t>(source, coef, chunk, start, len, s, notes);
  }
  UpdateSlot slot = {};
  if (!kTelemetry) return slot;
  const Found<value_t, kWidth>& found = notes.found;
  slot.weight_sumsq = fold(found.weights);
  slot.update_sumsq = fold(found.updates);
  bool suspects_state = found.suspects_updates;
  const auto infinite = found.largest >= kInfinite<value_t>;  // all bits, where it is so
  suspects_state |= sum_of_lanes<word_t, kWidth>((Pack<word_t, kWidth>)infinite) != 0;
  for (int k = 0; k < 3; ++k) {
    slot.loaded[k] = word_t(found.rest_loaded[k] + sum_of_lanes<word_t, kWidth>(found.loaded[k]));
    slot.stored[k] = word_t(found.rest_stored[k] + sum_of_lanes<word_t, kWidth>(found.stored[k]));
  }
  const auto bad_in = [&](const void* moment) {
    return suspects_state && moment != nullptr
               ? count_bad(static_cast<const value_t*>(moment), chunk.len)
               : 0.0;
  };
  if (found.suspects_weights || found.suspects_updates) slot.bad[0] = count_bad(p, chunk.len);
  slot.bad[1] = bad_in(chunk.m);
  slot.bad[2] = bad_in(chunk.v);
  return slot;
}

// kWidth: how many float32 numbers a vector holds.
template <bool kTelemetry, int kWidth, typename value_t>
ZCLIP_ALWAYS_INLINE UpdateSlot update_chunk(const ChunkUpdate& chunk,
                                            const UpdateScalars<value_t>& s) {
  if constexpr (sizeof(value_t) == 8) {
    return update_chunk_of<kTelemetry, kSums<double>, double>(chunk, s);
  } else {
    switch (chunk.param_format) {
      case Format::kBfloat16:
        return chunk.stochastic ? update_chunk_of<kTelemetry, kWidth, RandomBfloat16>(chunk, s)
                                : update_chunk_of<kTelemetry, kWidth, Bfloat16>(chunk, s);
      case Format::kFloat16:
        return update_chunk_of<kTelemetry, kWidth, Float16>(chunk, s);
      default:
        return update_chunk_of<kTelemetry, kWidth, float>(chunk, s);
    }
  }
}

}  // namespace zclip::cpu
