// Eight numbers at a time, as the compiler's own vectors, which have all operators but one.

#pragma once

#include <math.h>
#include <cstdint>
#include <cstring>

#include "../math/optim.h"
#include "cpu_path.h"

namespace zclip {

constexpr int kVector = 8;
typedef float Floats __attribute__((vector_size(kVector * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kVector * sizeof(double))));
typedef uint32_t Words __attribute__((vector_size(kVector * sizeof(uint32_t))));
typedef uint64_t LongWords __attribute__((vector_size(kVector * sizeof(uint64_t))));

// Eight sums in float64, in halves that fit a register of AVX2.
struct WideSums {
  typedef float HalfFloats __attribute__((vector_size(kVector / 2 * sizeof(float))));
  typedef double Half __attribute__((vector_size(kVector / 2 * sizeof(double))));
  Half low = {}, high = {};

  ZCLIP_ALWAYS_INLINE void add(const Floats& x) {
    HalfFloats halves[2];
    std::memcpy(halves, &x, sizeof x);
    low += __builtin_convertvector(halves[0], Half);
    high += __builtin_convertvector(halves[1], Half);
  }

  ZCLIP_ALWAYS_INLINE void add(const Doubles& x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof x);
    low += halves[0];
    high += halves[1];
  }

  ZCLIP_ALWAYS_INLINE void store(double* to) const {
    std::memcpy(to, &low, sizeof low);
    std::memcpy(to + kVector / 2, &high, sizeof high);
  }
};

template <>
struct SquareRoot<Floats> {
  static ZCLIP_ALWAYS_INLINE void take(Floats* x) {
    float lanes[kVector];
    std::memcpy(lanes, x, sizeof lanes);
    for (float& lane : lanes) lane = sqrtf(lane);
    std::memcpy(x, lanes, sizeof lanes);
  }
};

template <>
struct SquareRoot<Doubles> {
  static ZCLIP_ALWAYS_INLINE void take(Doubles* x) {
    double lanes[kVector];
    std::memcpy(lanes, x, sizeof lanes);
    for (double& lane : lanes) lane = sqrt(lane);
    std::memcpy(x, lanes, sizeof lanes);
  }
};

}  // namespace zclip
