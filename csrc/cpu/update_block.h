// One update over a block of elements that are in the first-level cache, as loops that the compiler
// vectorises: the same text serves every instruction set, and gives the same bits on each, because
// the build forbids contraction and no floating-point sum is reordered.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../math/grad_stats.h"
#include "../math/optim.h"
#include "cpu_path.h"

namespace zclip::cpu {

constexpr int64_t kUpdateBlock = kBlock;

// Sums of bit patterns before and after an update, and the largest magnitude stored, as bits: NaN
// and Inf have the largest of all.
template <typename word_t>
struct Patterns {
  word_t loaded = 0;
  word_t stored = 0;
  word_t largest = 0;
};

template <typename value_t>
using Word = std::conditional_t<sizeof(value_t) == 8, uint64_t, uint32_t>;

template <typename value_t>
struct Block {
  value_t* p;
  const value_t* g;
  value_t* m;
  value_t* v;
  value_t* largest;
  value_t* update;  // what was subtracted
  int64_t len;
};

template <typename word_t>
ZCLIP_ALWAYS_INLINE word_t magnitude(word_t bits) {
  return bits & static_cast<word_t>(~word_t{0} >> 1);
}

// kUpdate(g, p, m, v, largest) returns what to subtract from p and changes the last three.
template <bool kFirst, bool kSecond, bool kMax, bool kTelemetry, typename value_t, typename Update>
ZCLIP_ALWAYS_INLINE void update_elements(const Block<value_t>& block,
                                         Patterns<Word<value_t>> (&seen)[3], Update&& update) {
  using word_t = Word<value_t>;
  value_t* __restrict p = block.p;
  const value_t* __restrict g = block.g;
  value_t* __restrict m = block.m;
  value_t* __restrict v = block.v;
  value_t* __restrict largest = block.largest;
  value_t* __restrict u = block.update;
  word_t loaded[3] = {}, stored[3] = {}, top[3] = {};
  for (int64_t i = 0; i < block.len; ++i) {
    value_t first = kFirst ? m[i] : value_t{};
    value_t second = kSecond ? v[i] : value_t{};
    value_t maximum = kMax ? largest[i] : value_t{};
    const value_t weight = p[i];
    if (kTelemetry) {
      loaded[0] += bits_of(weight);
      if (kFirst) loaded[1] += bits_of(first);
      if (kSecond) loaded[2] += bits_of(second);
    }
    const value_t change = update(g[i], weight, first, second, maximum);
    const value_t result = weight - change;
    p[i] = result;
    if (kFirst) m[i] = first;
    if (kSecond) v[i] = second;
    if (kMax) largest[i] = maximum;
    if (kTelemetry) {
      u[i] = change;
      stored[0] += bits_of(result);
      top[0] = std::max(top[0], magnitude(bits_of(result)));
      if (kFirst) {
        stored[1] += bits_of(first);
        top[1] = std::max(top[1], magnitude(bits_of(first)));
      }
      if (kSecond) {
        stored[2] += bits_of(second);
        top[2] = std::max(top[2], magnitude(bits_of(second)));
      }
    }
  }
  if (!kTelemetry) return;
  for (int k = 0; k < 3; ++k) {
    seen[k].loaded += loaded[k];
    seen[k].stored += stored[k];
    seen[k].largest = std::max(seen[k].largest, top[k]);
  }
}

// Which loop a tensor needs.
enum class Loop { kAdam, kAmsgrad, kSgd, kMomentum, kNesterov, kLion };

template <bool kTelemetry, typename value_t>
ZCLIP_ALWAYS_INLINE void update_block(Loop loop, const Block<value_t>& block,
                                      const UpdateScalars<value_t>& s,
                                      Patterns<Word<value_t>> (&seen)[3]) {
  switch (loop) {
    case Loop::kAdam:
      return update_elements<true, true, false, kTelemetry>(
          block, seen, [&](value_t g, value_t p, value_t& m, value_t& v, value_t& x) {
            return adam_update<false>(g, p, m, v, x, s);
          });
    case Loop::kAmsgrad:
      return update_elements<true, true, true, kTelemetry>(
          block, seen, [&](value_t g, value_t p, value_t& m, value_t& v, value_t& x) {
            return adam_update<true>(g, p, m, v, x, s);
          });
    case Loop::kSgd:
      return update_elements<false, false, false, kTelemetry>(
          block, seen, [&](value_t g, value_t p, value_t& m, value_t&, value_t&) {
            return sgd_update<Momentum::kNone>(g, p, m, s);
          });
    case Loop::kMomentum:
      return update_elements<true, false, false, kTelemetry>(
          block, seen, [&](value_t g, value_t p, value_t& m, value_t&, value_t&) {
            return sgd_update<Momentum::kPlain>(g, p, m, s);
          });
    case Loop::kNesterov:
      return update_elements<true, false, false, kTelemetry>(
          block, seen, [&](value_t g, value_t p, value_t& m, value_t&, value_t&) {
            return sgd_update<Momentum::kNesterov>(g, p, m, s);
          });
    default:
      return update_elements<true, false, false, kTelemetry>(
          block, seen, [&](value_t g, value_t p, value_t& m, value_t&, value_t&) {
            return lion_update(g, p, m, s);
          });
  }
}

// A sum of squares that grows block by block, in the order of math/grad_stats.h. A block whose
// quick sum cannot be believed is summed again in float64, without its NaN and Inf.
struct RunningSquares {
  double wide[kWide] = {};

  ZCLIP_ALWAYS_INLINE void add(const float* data, int64_t len) {
    float lanes[kLanes] = {};
    int64_t row = 0;
    for (; row + kLanes <= len; row += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += data[row + lane] * data[row + lane];
      }
    }
    for (int64_t lane = 0; row + lane < len; ++lane) {
      lanes[lane] += data[row + lane] * data[row + lane];
    }
    for (int half = kLanes / 2; half >= kWide; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    double quick = 0.0;
    for (int lane = 0; lane < kWide; ++lane) quick += lanes[lane];
    if (!trustworthy(quick)) return add_exactly(data, len);
    for (int lane = 0; lane < kWide; ++lane) wide[lane] += lanes[lane];
  }

  ZCLIP_ALWAYS_INLINE void add(const double* data, int64_t len) { add_exactly(data, len); }

  template <typename value_t>
  ZCLIP_ALWAYS_INLINE void add_exactly(const value_t* data, int64_t len) {
    int64_t i = 0;
    for (; i + kWide <= len; i += kWide) {
      for (int lane = 0; lane < kWide; ++lane) wide[lane] += square(data[i + lane]);
    }
    for (int lane = 0; i < len; ++i, ++lane) wide[lane] += square(data[i]);
  }

  template <typename value_t>
  static ZCLIP_ALWAYS_INLINE double square(value_t x) {
    const double finite = is_finite(x) ? static_cast<double>(x) : 0.0;
    return finite * finite;
  }

  double total() const {
    const double a = wide[0] + wide[4], b = wide[1] + wide[5];
    const double c = wide[2] + wide[6], d = wide[3] + wide[7];
    return (a + c) + (b + d);
  }
};

}  // namespace zclip::cpu
