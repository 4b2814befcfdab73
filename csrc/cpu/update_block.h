// One update over a block of elements, in the vectors of the compiler: the same text serves every
// instruction set, and gives the same bits on each, because the build forbids contraction and every
// sum has a fixed order.
//
// Square root and division are long in coming. Whatever waits for them fills the queues of the
// processor, so that fewer vectors are under way at a time. So changes are found some rows of
// elements before they are applied: rounded, stored and measured. They wait in the first-level
// cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../math/grad_stats.h"
#include "../math/optim.h"
#include "stored_number.h"
#include "vectors.h"

namespace zclip::cpu {

// So many updates wait in the first-level cache until the sum of their squares is known to be good.
constexpr int64_t kUpdateBlock = 1024;

// Squares are added in so many sums, whatever the width of the vectors, and after eight terms each
// folded to kWide, which go on in float64: within (1 + 8 + 1) * 2^-24 for any data.
template <typename value_t>
constexpr int kSums = sizeof(value_t) == 8 ? 8 : 16;
template <typename value_t>
constexpr int64_t kGroup = 8 * kSums<value_t>;

static_assert(kWide == 8 && kUpdateBlock % kGroup<float> == 0, "whole groups");

// So many elements ahead of those that are applied, changes are found. In the caches more are
// quicker, up to these. Where memory is the limit, whatever waits in the first-level cache is in
// the way of what is being fetched: 16 rows take 13 % longer than two. Rounding takes a third.
template <typename value_t>
constexpr int64_t kAheadInCaches = 16 * kSums<value_t>;
template <typename value_t, typename number_t>
constexpr int64_t kAheadInMemory = (sizeof(number_t) == 2 ? 3 : 2) * kSums<value_t>;

// What an update of a tensor found in a run of its elements.
template <typename value_t, int kWidth>
struct Found {
  using words = Pack<Word<value_t>, kWidth>;
  words loaded[3] = {};
  words stored[3] = {};
  words largest = {};  // pattern of the watched moment: that of NaN, Inf or a negative second one?
  // The elements that fill no vector.
  Word<value_t> rest_loaded[3] = {};
  Word<value_t> rest_stored[3] = {};
  // Sums of squares of weights and of updates.
  double weights[kWide] = {};
  double updates[kWide] = {};
  value_t update_scale = 1;       // what updates are multiplied by before they are squared
  bool suspects_weights = false;  // one of them may be NaN or Inf
  bool suspects_updates = false;
};

// number_t is the format of the parameter, grad_t that of its gradient, value_t that of its state
// and of the arithmetic.
template <typename number_t, typename grad_t, typename value_t>
struct Block {
  number_t* p;
  const grad_t* g;
  value_t* m;
  value_t* v;
  value_t* largest;
  value_t* update;  // what was subtracted
  value_t coef;     // of the gradient
  int64_t len;
  int64_t ahead;      // changes of so many elements are found before the first is applied
  RandomBits random;  // for rounding
};

// The larger of two patterns, in every lane.
template <typename bits_t>
ZCLIP_ALWAYS_INLINE bits_t larger(const bits_t& a, const bits_t& b) {
  return a > b ? a : b;
}

// Adds kWide floats, or doubles, to kWide sums.
template <typename pack_t>
ZCLIP_ALWAYS_INLINE void add_wide(const pack_t& x, Pack<double, kWide>& sums) {
  sums += __builtin_convertvector(x, Pack<double, kWide>);
}

// Folds the sums of one group by halves, down to kWide.
template <typename value_t, int kWidth>
ZCLIP_ALWAYS_INLINE void add_group(const Pack<value_t, kWidth> (&squares)[kSums<value_t> / kWidth],
                                   Pack<double, kWide>& sums) {
  if constexpr (kSums<value_t> == kWide) {
    add_wide(squares[0], sums);
  } else {
    Pack<value_t, kWide> halves[2];
    std::memcpy(halves, squares, sizeof halves);
    add_wide<Pack<value_t, kWide>>(halves[0] + halves[1], sums);
  }
}

// Multiplied before they are squared, numbers below 2^-32 lose nothing to underflow: neither are
// their squares subnormal, which takes the hardware several times as long as any others, nor do any
// but zeros sum to 0. A power of two rounds nothing.
ZCLIP_ALWAYS_INLINE float tiny_scale() { return rescaled<Rescale::kTiny>(1.0f); }

// The squares of a block of such numbers.
template <typename number_t>
ZCLIP_ALWAYS_INLINE void add_tiny(const number_t* data, int64_t len, double* wide) {
  using vec = Pack<float, kSums<float>>;
  Pack<double, kWide> sums = {};
  Pack<uint32_t, kSums<float>> bits;
  const int64_t whole = len - len % kSums<float>;
  for (int64_t group = 0; group < whole; group += kGroup<float>) {
    vec squares[1] = {};
    const int64_t end = std::min(group + kGroup<float>, whole);
    for (int64_t i = group; i < end; i += kSums<float>) {
      const vec x = load_number<vec>(data + i, &bits) * tiny_scale();
      squares[0] += x * x;
    }
    add_group<float, kSums<float>>(squares, sums);
  }
  for (int64_t i = whole; i < len; ++i) {
    const float x = widen_flat(data[i]) * tiny_scale();
    sums[i % kWide] += static_cast<double>(x * x);
  }
  for (int k = 0; k < kWide; ++k) wide[k] += restored<Rescale::kTiny>(sums[k]);
}

// The squares of a block whose quick sum cannot be believed, without those of NaN and Inf.
template <typename value_t, typename number_t>
ZCLIP_ALWAYS_INLINE void add_exactly(const number_t* data, int64_t len, double* wide) {
  using words = Pack<Word<value_t>, kWide>;
  constexpr auto kExponent =
      static_cast<Word<value_t>>(sizeof(value_t) == 8 ? 0x7ff0000000000000ull : 0x7f800000ull);
  const int64_t whole = len - len % kWide;
  Pack<double, kWide> sums;
  std::memcpy(&sums, wide, sizeof sums);
  for (int64_t i = 0; i < whole; i += kWide) {
    words bits;
    const auto x = load_number<Pack<value_t, kWide>>(data + i, &bits);
    const words loaded = bits_as<words>(x), zero = {};
    const auto finite =
        bits_as<Pack<value_t, kWide>>((loaded & kExponent) == kExponent ? zero : loaded);
    const auto doubled = __builtin_convertvector(finite, Pack<double, kWide>);
    sums += doubled * doubled;
  }
  std::memcpy(wide, &sums, sizeof sums);
  for (int64_t i = whole; i < len; ++i) {
    const auto x = widen_flat(data[i]);
    const double finite = is_finite(x) ? static_cast<double>(x) : 0.0;
    wide[i % kWide] += finite * finite;
  }
}

// Adds the wide sums by halves.
ZCLIP_ALWAYS_INLINE double fold(const double* wide) {
  const double a = wide[0] + wide[4], b = wide[1] + wide[5];
  const double c = wide[2] + wide[6], d = wide[3] + wide[7];
  return (a + c) + (b + d);
}

// Adds the lanes by halves: one after another they would take as long as a small tensor.
template <typename word_t, int kWidth>
ZCLIP_ALWAYS_INLINE word_t sum_of_lanes(const Pack<word_t, kWidth>& lanes) {
  if constexpr (kWidth == 2) {
    return lanes[0] + lanes[1];
  } else {
    Pack<word_t, kWidth / 2> halves[2];
    std::memcpy(halves, &lanes, sizeof halves);
    return sum_of_lanes<word_t, kWidth / 2>(halves[0] + halves[1]);
  }
}

// Adds the quick sums of a block, or does it again; returns whether one may be NaN or Inf. `scale`
// is what the numbers were multiplied by; it becomes that of the next block, which is likely to
// hold numbers of the same size.
template <typename value_t, typename number_t>
ZCLIP_ALWAYS_INLINE bool add_block(const double* quick, const number_t* data, int64_t len,
                                   double* wide, value_t* scale) {
  const double total = fold(quick);
  if constexpr (std::is_same_v<value_t, float>) {
    if (*scale != 1.0f && is_finite(total)) {
      for (int k = 0; k < kWide; ++k) wide[k] += restored<Rescale::kTiny>(quick[k]);
      *scale = restored<Rescale::kTiny>(total) < kTinySum<float> ? tiny_scale() : 1.0f;
      return false;
    }
    if (*scale == 1.0f && total < kTinySum<float>) {
      add_tiny(data, len, wide);
      *scale = tiny_scale();
      return false;
    }
  }
  if (*scale == value_t{1} && trustworthy<value_t>(total)) {
    for (int k = 0; k < kWide; ++k) wide[k] += quick[k];
    return false;
  }
  add_exactly<value_t>(data, len, wide);
  *scale = value_t{1};
  return !is_finite(total);
}

// Asks for what a row of elements will want some time later.
template <bool kFirst, bool kSecond, typename number_t, typename grad_t, typename value_t>
ZCLIP_ALWAYS_INLINE void prefetch_row(const Block<number_t, grad_t, value_t>& block, int64_t i) {
  __builtin_prefetch(reinterpret_cast<const char*>(block.g + i) + kPrefetchBytes);
  __builtin_prefetch(reinterpret_cast<char*>(block.p + i) + kPrefetchBytes, 1);
  if (kFirst) __builtin_prefetch(reinterpret_cast<char*>(block.m + i) + kPrefetchBytes, 1);
  if (kSecond) __builtin_prefetch(reinterpret_cast<char*>(block.v + i) + kPrefetchBytes, 1);
}

// What an update loaded and stored in whole vectors: sums of patterns and of squares.
template <typename value_t, int kWidth>
struct Sums {
  Pack<Word<value_t>, kWidth> loaded[3];
  Pack<Word<value_t>, kWidth> stored[3];
  Pack<Word<value_t>, kWidth> largest;  // of the watched moment
  Pack<double, kWide> weights;
  Pack<double, kWide> updates;
};

// Sums of squares of one group.
template <typename value_t, int kWidth>
struct Squares {
  Pack<value_t, kWidth> weights[kSums<value_t> / kWidth] = {};
  Pack<value_t, kWidth> updates[kSums<value_t> / kWidth] = {};
};

// Updates the moments of a row, and notes what is to be subtracted from the parameters.
template <Loop kLoop, bool kTelemetry, int kWidth, typename number_t, typename grad_t,
          typename value_t>
ZCLIP_ALWAYS_INLINE void find_changes(const Block<number_t, grad_t, value_t>& block, int64_t row,
                                      const UpdateScalars<Pack<value_t, kWidth>>& scalars,
                                      Sums<value_t, kWidth>& sums) {
  using Traits = LoopTraits<kLoop>;
  constexpr bool kFirst = Traits::kHasFirst, kSecond = Traits::kHasSecond;
  constexpr bool kMax = Traits::kHasMaximum;
  using vec = Pack<value_t, kWidth>;
  using words = Pack<Word<value_t>, kWidth>;
  prefetch_row<kFirst, kSecond>(block, row);
#pragma GCC unroll 2
  for (int64_t i = row; i < row + kSums<value_t>; i += kWidth) {
    vec first = {}, second = {}, maximum = {};
    words bits;
    const vec weight = load_number<vec>(block.p + i, &bits);
    if (kFirst) first = load_pack<vec>(block.m + i);
    if (kSecond) second = load_pack<vec>(block.v + i);
    if (kMax) maximum = load_pack<vec>(block.largest + i);
    if (kTelemetry && kFirst) sums.loaded[1] += pattern_from((words)first, value_t{});
    if (kTelemetry && kSecond) sums.loaded[2] += pattern_from((words)second, value_t{});
    const vec gradient = load_number<vec>(block.g + i, &bits) * block.coef;
    const vec change = loop_update<kLoop>(gradient, weight, first, second, maximum, scalars);
    if (kFirst) store_pack(block.m + i, first);
    if (kSecond) store_pack(block.v + i, second);
    if (kMax) store_pack(block.largest + i, maximum);
    store_pack(block.update + i, change);
    if (!kTelemetry) continue;
    if (kFirst) sums.stored[1] += pattern_from((words)first, value_t{});
    if (kSecond) sums.stored[2] += pattern_from((words)second, value_t{});
    if (Traits::kWatched == Watched::kFirst) {
      sums.largest = larger(sums.largest, (words)first << 1 >> 1);
    }
    if (Traits::kWatched == Watched::kSecond) sums.largest = larger(sums.largest, (words)second);
  }
}

// Subtracts what find_changes() noted.
template <bool kTelemetry, int kWidth, typename number_t, typename grad_t, typename value_t>
ZCLIP_ALWAYS_INLINE void apply_changes(const Block<number_t, grad_t, value_t>& block, int64_t row,
                                       value_t update_scale, Squares<value_t, kWidth>& squares,
                                       Sums<value_t, kWidth>& sums) {
  using vec = Pack<value_t, kWidth>;
#pragma GCC unroll 2
  for (int part = 0; part < kSums<value_t> / kWidth; ++part) {
    const int64_t i = row + part * kWidth;
    Pack<Word<value_t>, kWidth> before, after;
    const vec change = load_pack<vec>(block.update + i);
    const vec weight = load_number<vec>(block.p + i, &before) - change;
    const vec result = store_number(weight, block.random + i, block.p + i, &after);
    if (!kTelemetry) continue;
    const vec scaled = change * update_scale;
    squares.updates[part] += scaled * scaled;
    squares.weights[part] += result * result;
    sums.loaded[0] += pattern_from(before, number_t{});
    sums.stored[0] += pattern_from(after, number_t{});
  }
}

template <Loop kLoop, bool kTelemetry, int kWidth, typename number_t, typename grad_t,
          typename value_t>
ZCLIP_ALWAYS_INLINE void update_elements(const Block<number_t, grad_t, value_t>& given,
                                         const UpdateScalars<value_t>& scalars,
                                         Found<value_t, kWidth>& found) {
  using Traits = LoopTraits<kLoop>;
  constexpr bool kFirst = Traits::kHasFirst, kSecond = Traits::kHasSecond;
  constexpr bool kMax = Traits::kHasMaximum;
  constexpr Watched kWatched = Traits::kWatched;
  // Copies, which no store can change: the compiler keeps them in registers.
  const Block<number_t, grad_t, value_t> block = given;
  const UpdateScalars<value_t> s = scalars;
  Sums<value_t, kWidth> sums = {};
  for (int k = 0; k < 3; ++k) {
    sums.loaded[k] = found.loaded[k];
    sums.stored[k] = found.stored[k];
  }
  sums.largest = found.largest;
  const value_t update_scale = found.update_scale;
  constexpr int64_t kRow = kSums<value_t>;
  const int64_t whole = block.len - block.len % kRow;
  const auto in_lanes = spread<Pack<value_t, kWidth>>(s);
  const int64_t ahead = std::min(block.ahead, whole);
  for (int64_t row = 0; row < ahead; row += kRow) {
    find_changes<kLoop, kTelemetry>(block, row, in_lanes, sums);
  }
  for (int64_t group = 0; group < whole; group += kGroup<value_t>) {
    Squares<value_t, kWidth> squares;
    const int64_t end = std::min(group + kGroup<value_t>, whole);
    for (int64_t row = group; row < end; row += kRow) {
      if (row < whole - ahead) find_changes<kLoop, kTelemetry>(block, row + ahead, in_lanes, sums);
      apply_changes<kTelemetry>(block, row, update_scale, squares, sums);
    }
    if (!kTelemetry) continue;
    add_group<value_t, kWidth>(squares.weights, sums.weights);
    add_group<value_t, kWidth>(squares.updates, sums.updates);
  }
  for (int k = 0; k < 3; ++k) {
    found.loaded[k] = sums.loaded[k];
    found.stored[k] = sums.stored[k];
  }
  found.largest = sums.largest;
  double weights[kWide], updates[kWide];
  std::memcpy(weights, &sums.weights, sizeof weights);
  std::memcpy(updates, &sums.updates, sizeof updates);
  for (int64_t i = whole; i < block.len; ++i) {
    value_t first = kFirst ? block.m[i] : value_t{}, second = kSecond ? block.v[i] : value_t{};
    value_t maximum = kMax ? block.largest[i] : value_t{};
    Word<value_t> bits, grad_bits;
    const auto gradient = load_number<value_t>(block.g + i, &grad_bits);
    const auto weight = load_number<value_t>(block.p + i, &bits);
    found.rest_loaded[0] += pattern_from(bits, number_t{});
    found.rest_loaded[1] += pattern_of(first);
    found.rest_loaded[2] += pattern_of(second);
    const value_t change =
        loop_update<kLoop>(gradient * block.coef, weight, first, second, maximum, s);
    const value_t result = store_number(weight - change, block.random + i, block.p + i, &bits);
    if (kFirst) block.m[i] = first;
    if (kSecond) block.v[i] = second;
    if (kMax) block.largest[i] = maximum;
    block.update[i] = change;
    const int k = static_cast<int>(i % kWide);
    const value_t scaled = change * update_scale;
    weights[k] += static_cast<double>(result * result);
    updates[k] += static_cast<double>(scaled * scaled);
    found.rest_stored[0] += pattern_from(bits, number_t{});
    found.rest_stored[1] += pattern_of(first);
    found.rest_stored[2] += pattern_of(second);
    const auto watched = kWatched == Watched::kFirst ? bits_of(first) << 1 >> 1 : bits_of(second);
    found.largest[0] = larger<Word<value_t>>(found.largest[0], watched);
  }
  if (!kTelemetry) return;
  value_t unscaled = 1;  // weights are seldom tiny, and zeros are as quick as any
  found.suspects_weights |= add_block(weights, block.p, block.len, found.weights, &unscaled);
  found.suspects_updates |=
      add_block(updates, block.update, block.len, found.updates, &found.update_scale);
}

template <bool kTelemetry, int kWidth, typename number_t, typename grad_t, typename value_t>
ZCLIP_ALWAYS_INLINE void update_block(Loop loop, const Block<number_t, grad_t, value_t>& block,
                                      const UpdateScalars<value_t>& s,
                                      Found<value_t, kWidth>& found) {
  switch (loop) {
    case Loop::kAdam:
      return update_elements<Loop::kAdam, kTelemetry>(block, s, found);
    case Loop::kAmsgrad:
      return update_elements<Loop::kAmsgrad, kTelemetry>(block, s, found);
    case Loop::kSgd:
      return update_elements<Loop::kSgd, kTelemetry>(block, s, found);
    case Loop::kMomentum:
      return update_elements<Loop::kMomentum, kTelemetry>(block, s, found);
    case Loop::kNesterov:
      return update_elements<Loop::kNesterov, kTelemetry>(block, s, found);
    default:
      return update_elements<Loop::kLion, kTelemetry>(block, s, found);
  }
}

}  // namespace zclip::cpu
