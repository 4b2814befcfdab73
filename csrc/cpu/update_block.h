// One update over a block of elements that are in the first-level cache, eight at a time, in the
// vectors of the compiler: the same text serves every instruction set, and gives the same bits on
// each, because the build forbids contraction and every sum has a fixed order.
//
// Everything is in one loop: square root and division keep one unit busy for ten cycles per vector,
// in which the others do the telemetry for nothing.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../math/grad_stats.h"
#include "../math/optim.h"
#include "vectors.h"

namespace zclip::cpu {

constexpr int64_t kUpdateBlock = kBlock;
static_assert(kVector == kWide && kUpdateBlock % (kVector * kVector) == 0, "whole groups");

template <typename value_t>
using Word = std::conditional_t<sizeof(value_t) == 8, uint64_t, uint32_t>;

template <typename value_t>
using Vec = std::conditional_t<sizeof(value_t) == 8, Doubles, Floats>;
template <typename value_t>
using VecWords = std::conditional_t<sizeof(value_t) == 8, LongWords, Words>;

template <typename vector_t, typename value_t>
ZCLIP_ALWAYS_INLINE vector_t load_vec(const value_t* from) {
  vector_t loaded;
  std::memcpy(&loaded, from, sizeof loaded);
  return loaded;
}

template <typename vector_t, typename value_t>
ZCLIP_ALWAYS_INLINE void store_vec(value_t* to, const vector_t& vector) {
  std::memcpy(to, &vector, sizeof vector);
}

// What an update of a tensor found in a run of its elements.
template <typename value_t>
struct Seen {
  Word<value_t> loaded[3] = {};
  Word<value_t> stored[3] = {};
  Word<value_t> alarm = 0;  // its highest bit: the watched moment may hold NaN or Inf
  // Sums of squares of weights and of updates.
  double weights[kWide] = {};
  double updates[kWide] = {};
  bool suspects_weights = false;  // one of them may be NaN or Inf
  bool suspects_updates = false;
};

template <typename value_t>
struct Block {
  value_t* p;
  const value_t* g;
  value_t* m;
  value_t* v;
  value_t* largest;
  value_t* update;  // what was subtracted
  value_t coef;     // of the gradient
  int64_t len;
  bool is_narrow;  // p will be rounded: its squares are taken afterwards
};

// Which moment is watched for NaN and Inf: where the updates would not tell.
enum class Watched { kNone, kFirst, kSecond };

// Has its highest bit set if the exponent is that of NaN and Inf, or the number is negative, which
// no second moment is.
template <typename bits_t, typename value_t>
ZCLIP_ALWAYS_INLINE bits_t alarm_of(const bits_t& bits, value_t) {
  constexpr auto kLastOfExponent =
      static_cast<Word<value_t>>(sizeof(value_t) == 8 ? 0x0010000000000000ull : 0x00800000ull);
  return bits + kLastOfExponent;
}

// The squares of a block whose quick sum cannot be believed, without those of NaN and Inf.
template <typename value_t>
ZCLIP_ALWAYS_INLINE void add_exactly(const value_t* data, int64_t len, double* wide) {
  for (int64_t i = 0; i < len; ++i) {
    const double finite = is_finite(data[i]) ? static_cast<double>(data[i]) : 0.0;
    wide[i % kWide] += finite * finite;
  }
}

// Adds the quick sums of a block, or does it again; returns whether one may be NaN or Inf.
template <typename value_t>
ZCLIP_ALWAYS_INLINE bool add_block(const double* quick, const value_t* data, int64_t len,
                                   double* wide) {
  double total = 0.0;
  for (int k = 0; k < kWide; ++k) total += quick[k];
  if (trustworthy<value_t>(total)) {
    for (int k = 0; k < kWide; ++k) wide[k] += quick[k];
    return false;
  }
  add_exactly(data, len, wide);
  return !is_finite(total);
}

template <bool kFirst, bool kSecond, bool kMax, Watched kWatched, bool kTelemetry, typename value_t,
          typename Update>
ZCLIP_ALWAYS_INLINE void update_elements(const Block<value_t>& block, Seen<value_t>& seen,
                                         Update&& update) {
  using vec = Vec<value_t>;
  using words = VecWords<value_t>;
  words loaded[3] = {}, stored[3] = {}, top = {};
  WideSums weight_sums, update_sums;
  const int64_t whole = block.len - block.len % kVector;
  for (int64_t group = 0; group < whole; group += kVector * kVector) {
    // Eight squares to a float32 sum, then float64: within 9 * 2^-24 for any data.
    vec weight_squares = {}, update_squares = {};
    const int64_t end = std::min(group + kVector * kVector, whole);
    for (int64_t i = group; i < end; i += kVector) {
      vec first = {}, second = {}, maximum = {};
      const vec weight = load_vec<vec>(block.p + i);
      if (kFirst) first = load_vec<vec>(block.m + i);
      if (kSecond) second = load_vec<vec>(block.v + i);
      if (kMax) maximum = load_vec<vec>(block.largest + i);
      if (kTelemetry) {
        loaded[0] += (words)weight;
        if (kFirst) loaded[1] += (words)first;
        if (kSecond) loaded[2] += (words)second;
      }
      const vec gradient = load_vec<vec>(block.g + i) * block.coef;
      const vec change = update(gradient, weight, first, second, maximum);
      const vec result = weight - change;
      store_vec(block.p + i, result);
      if (kFirst) store_vec(block.m + i, first);
      if (kSecond) store_vec(block.v + i, second);
      if (kMax) store_vec(block.largest + i, maximum);
      if (kTelemetry) {
        store_vec(block.update + i, change);
        update_squares += change * change;
        weight_squares += result * result;
        stored[0] += (words)result;
        if (kFirst) stored[1] += (words)first;
        if (kSecond) stored[2] += (words)second;
        if (kWatched != Watched::kNone) {
          const words bits = kWatched == Watched::kFirst ? (words)first << 1 >> 1 : (words)second;
          top |= alarm_of(bits, value_t{});
        }
      }
    }
    if (kTelemetry) {
      weight_sums.add(weight_squares);
      update_sums.add(update_squares);
    }
  }
  double weights[kWide], updates[kWide];
  weight_sums.store(weights);
  update_sums.store(updates);
  for (int64_t i = whole; i < block.len; ++i) {
    value_t first = kFirst ? block.m[i] : value_t{}, second = kSecond ? block.v[i] : value_t{};
    value_t maximum = kMax ? block.largest[i] : value_t{};
    const value_t weight = block.p[i];
    const int k = static_cast<int>(i % kVector);
    loaded[0][k] += bits_of(weight);
    loaded[1][k] += bits_of(first);
    loaded[2][k] += bits_of(second);
    const value_t change = update(block.g[i] * block.coef, weight, first, second, maximum);
    const value_t result = weight - change;
    block.p[i] = result;
    if (kFirst) block.m[i] = first;
    if (kSecond) block.v[i] = second;
    if (kMax) block.largest[i] = maximum;
    block.update[i] = change;
    weights[k] += static_cast<double>(result * result);
    updates[k] += static_cast<double>(change * change);
    stored[0][k] += bits_of(result);
    stored[1][k] += bits_of(first);
    stored[2][k] += bits_of(second);
    const auto bits = kWatched == Watched::kFirst ? bits_of(first) << 1 >> 1 : bits_of(second);
    top[k] |= alarm_of(bits, value_t{});
  }
  if (!kTelemetry) return;
  for (int k = 0; k < kVector; ++k) {
    for (int t = 0; t < 3; ++t) {
      seen.loaded[t] += loaded[t][k];
      seen.stored[t] += stored[t][k];
    }
    if (kWatched != Watched::kNone) seen.alarm |= top[k];
  }
  if (!block.is_narrow) {
    seen.suspects_weights |= add_block(weights, block.p, block.len, seen.weights);
  }
  seen.suspects_updates |= add_block(updates, block.update, block.len, seen.updates);
}

// The sum of squares of parameters that have been rounded to 16 bits; as in the loop above.
ZCLIP_ALWAYS_INLINE void add_rounded(const float* data, int64_t len, Seen<float>& seen) {
  WideSums sums;
  const int64_t whole = len - len % kVector;
  for (int64_t group = 0; group < whole; group += kVector * kVector) {
    Floats squares = {};
    const int64_t end = std::min(group + kVector * kVector, whole);
    for (int64_t i = group; i < end; i += kVector) {
      const Floats x = load_vec<Floats>(data + i);
      squares += x * x;
    }
    sums.add(squares);
  }
  double quick[kWide];
  sums.store(quick);
  for (int64_t i = whole; i < len; ++i) {
    quick[i % kVector] += static_cast<double>(data[i] * data[i]);
  }
  seen.suspects_weights |= add_block(quick, data, len, seen.weights);
}

// Which loop a tensor needs.
enum class Loop { kAdam, kAmsgrad, kSgd, kMomentum, kNesterov, kLion };

template <bool kTelemetry, typename value_t>
ZCLIP_ALWAYS_INLINE void update_block(Loop loop, const Block<value_t>& block,
                                      const UpdateScalars<value_t>& s, Seen<value_t>& seen) {
  switch (loop) {
    case Loop::kAdam:
      return update_elements<true, true, false, Watched::kSecond, kTelemetry>(
          block, seen, [&](auto g, auto p, auto& m, auto& v, auto& x) {
            return adam_update<false>(g, p, m, v, x, s);
          });
    case Loop::kAmsgrad:
      return update_elements<true, true, true, Watched::kSecond, kTelemetry>(
          block, seen, [&](auto g, auto p, auto& m, auto& v, auto& x) {
            return adam_update<true>(g, p, m, v, x, s);
          });
    case Loop::kSgd:
      return update_elements<false, false, false, Watched::kNone, kTelemetry>(
          block, seen, [&](auto g, auto p, auto& m, auto&, auto&) {
            return sgd_update<Momentum::kNone>(g, p, m, s);
          });
    case Loop::kMomentum:
      return update_elements<true, false, false, Watched::kNone, kTelemetry>(
          block, seen, [&](auto g, auto p, auto& m, auto&, auto&) {
            return sgd_update<Momentum::kPlain>(g, p, m, s);
          });
    case Loop::kNesterov:
      return update_elements<true, false, false, Watched::kNone, kTelemetry>(
          block, seen, [&](auto g, auto p, auto& m, auto&, auto&) {
            return sgd_update<Momentum::kNesterov>(g, p, m, s);
          });
    default:
      return update_elements<true, false, false, Watched::kFirst, kTelemetry>(
          block, seen,
          [&](auto g, auto p, auto& m, auto&, auto&) { return lion_update(g, p, m, s); });
  }
}

// Adds the wide sums by halves.
inline double fold(const double* wide) {
  const double a = wide[0] + wide[4], b = wide[1] + wide[5];
  const double c = wide[2] + wide[6], d = wide[3] + wide[7];
  return (a + c) + (b + d);
}

}  // namespace zclip::cpu
