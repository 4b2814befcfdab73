// The arithmetic of the fused optimizers, one element at a time: what a gradient, already scaled,
// does to a parameter and its state. The CPU loops, the CUDA kernel and the SIMT tests call these
// same functions; zclip/reference/optim_update.py says the same in torch.

#pragma once

#include <math.h>
#include <cstdint>

#include "number.h"

namespace zclip {

enum class Algorithm : int { kAdam = 0, kSgd = 1, kLion = 2 };

// Settings of one parameter group, float64 [kNumOptimSettings]. For SGD kBeta1 is the momentum and
// kBeta2 the dampening.
enum OptimSetting : int {
  kLr = 0,
  kBeta1,
  kBeta2,
  kEps,
  kWeightDecay,
  kOptimFlags,
  kNumOptimSettings
};

enum OptimFlag : int {
  kMaximize = 1,
  kDecoupled = 2,  // weight decay acts on the weights, not through the gradient
  kAmsgrad = 4,
  kNesterov = 8,
  kStochastic = 16,     // round bfloat16 parameters stochastically
  kDropNonFinite = 32,  // read NaN and Inf in a gradient as zero
};

// Columns of the float64 [num_tensors, kNumTelemetry] telemetry, all of values after the update.
enum TelemetryColumn : int {
  kWeightSumSq = 0,  // of the finite weights
  kUpdateSumSq,      // of what was subtracted from them, before rounding to their format
  kWeightBad,        // how many weights are NaN or Inf
  kFirstBad,         // likewise of the first moment or momentum
  kSecondBad,        // likewise of the second moment
  kForeign,          // bits of ForeignFlag
  kNumTelemetry
};

// Which memory does not hold what the last update stored there.
enum ForeignFlag : int { kForeignWeight = 1, kForeignFirst = 2, kForeignSecond = 4 };

// Elements of the float32 [kNumSummary] summary of a step.
enum SummaryColumn : int {
  kTaken = 0,       // exactly 1 if the update was applied, 0 if the step was skipped
  kHealthFlags,     // bits of HealthFlag
  kFirstBadTensor,  // index of the first tensor with a NaN or Inf, or -1
  kFirstForeign,    // index of the first tensor with a bit of ForeignFlag, or -1
  kWeightNorm,
  kUpdateNorm,
  kNumSummary
};

enum HealthFlag : int { kBadWeight = 1, kBadState = 2, kForeignWrite = 4 };

// Columns of the int64 [num_tensors, kNumLedger] ledger: the sums of bit patterns as stored by the
// last update, how many of them are known, and how many updates were taken.
enum LedgerColumn : int {
  kStoredWeight = 0,
  kStoredFirst,
  kStoredSecond,
  kIsKnown,
  kUpdates,
  kNumLedger
};

// The bits of a number, or of a vector of them, rotated until those of its mantissa are the highest
// of a word of 32 bits, of float64 of 64. Patterns are summed modulo that word: integers, so that
// the order of addition does not matter, and one flipped bit always changes the sum. The exponent
// stands lowest, or the modulus would cut off what multiplies many numbers by a power of two.
template <int kMantissaBits, typename bits_t>
ZCLIP_HD bits_t rotated(bits_t bits) {
  constexpr int kWordBits = kMantissaBits > 23 ? 64 : 32;
  return bits << (kWordBits - kMantissaBits) | bits >> kMantissaBits;
}
template <typename bits_t>
ZCLIP_HD bits_t pattern_from(bits_t bits, float) {
  return rotated<23>(bits);
}
template <typename bits_t>
ZCLIP_HD bits_t pattern_from(bits_t bits, double) {
  return rotated<52>(bits);
}
template <typename bits_t>
ZCLIP_HD bits_t pattern_from(bits_t bits, Bfloat16) {
  return rotated<7>(bits);
}
template <typename bits_t>
ZCLIP_HD bits_t pattern_from(bits_t bits, Float16) {
  return rotated<10>(bits);
}
ZCLIP_HD uint32_t pattern_of(float x) { return pattern_from(bits_of(x), x); }
ZCLIP_HD uint64_t pattern_of(double x) { return pattern_from(bits_of(x), x); }
ZCLIP_HD uint32_t pattern_of(Bfloat16 x) { return pattern_from(uint32_t{x.bits}, x); }
ZCLIP_HD uint32_t pattern_of(Float16 x) { return pattern_from(uint32_t{x.bits}, x); }

// What is the same for all elements of a tensor, worked out in float64 and rounded once.
template <typename value_t>
struct UpdateScalars {
  value_t rate;      // Adam: lr / (1 - beta1^t); else lr
  value_t decay;     // of decoupled weight decay: lr * weight_decay
  value_t l2;        // of the other: weight_decay
  value_t weight1;   // Adam and Lion: 1 - beta1
  value_t weight2;   // Adam and Lion: 1 - beta2
  value_t eps;       // Adam
  value_t root;      // Adam: 1 / sqrt(1 - beta2^t)
  value_t momentum;  // SGD
  value_t keep;      // SGD: momentum, or 0 in the first update
  value_t give;      // SGD: 1 - dampening, or 1 in the first update
  value_t one;
  value_t least;  // finite number
};

// `updates`: how many were taken before this one; `lr` may differ from the setting.
template <typename value_t>
ZCLIP_HD UpdateScalars<value_t> scalars_of(Algorithm algorithm, const double* settings, double lr,
                                           double updates) {
  const int flags = static_cast<int>(settings[kOptimFlags]);
  const double beta1 = settings[kBeta1], beta2 = settings[kBeta2];
  const double decay = settings[kWeightDecay];
  UpdateScalars<value_t> s = {};
  s.rate = static_cast<value_t>(lr);
  s.decay = static_cast<value_t>((flags & kDecoupled) ? lr * decay : 0.0);
  s.l2 = static_cast<value_t>((flags & kDecoupled) ? 0.0 : decay);
  s.eps = static_cast<value_t>(settings[kEps]);
  s.weight1 = static_cast<value_t>(1.0 - beta1);
  s.weight2 = static_cast<value_t>(1.0 - beta2);
  s.root = static_cast<value_t>(1.0);
  s.one = static_cast<value_t>(1.0);
  s.least =
      static_cast<value_t>(sizeof(value_t) == 8 ? -1.7976931348623157e308 : -3.4028234663852886e38);
  if (algorithm == Algorithm::kAdam) {
    s.rate = static_cast<value_t>(lr / (1.0 - pow(beta1, updates + 1.0)));
    s.root = static_cast<value_t>(1.0 / sqrt(1.0 - pow(beta2, updates + 1.0)));
  } else if (algorithm == Algorithm::kSgd) {
    s.momentum = static_cast<value_t>(beta1);
    s.keep = static_cast<value_t>(updates > 0.0 ? beta1 : 0.0);
    s.give = static_cast<value_t>(updates > 0.0 ? 1.0 - beta2 : 1.0);
  }
  return s;
}

// Specialised for every type of elements. A square and a square root are exact to the last bit,
// whatever computes them.
template <typename value_t>
struct Powers;
template <>
struct Powers<float> {
  ZCLIP_HD static void square(float* x) { *x = *x * *x; }
  ZCLIP_HD static void take_root(float* x) { *x = sqrtf(*x); }
};
template <>
struct Powers<double> {
  ZCLIP_HD static void square(double* x) { *x = *x * *x; }
  ZCLIP_HD static void take_root(double* x) { *x = sqrt(*x); }
};

// Moments move by a fraction of the way instead of being multiplied by beta: beta itself, rounded
// to float32, would be off by 1e-8 in every step and by 1e-5 after a thousand.
//
// The type of the elements is that of the scalars, or a vector of them that has their operators and
// Powers of its own.
//
// Adam, arXiv 1412.6980, and AdamW, 1711.05101. Returns what to subtract from the parameter.
template <bool kAms, typename value_t, typename scalar_t>
ZCLIP_HD value_t adam_update(value_t g, value_t p, value_t& m, value_t& v, value_t& largest,
                             const UpdateScalars<scalar_t>& s) {
  m = m + (g - m) * s.weight1;
  value_t squared = g;
  Powers<value_t>::square(&squared);
  const value_t gap = squared - v;
  // An infinite v stays what it is and stops its element, as in torch; Inf - Inf would be NaN.
  const value_t least = value_t{} + s.least;
  const value_t bounded = gap < least ? least : gap;
  v = v + bounded * s.weight2;
  value_t second = v;
  if (kAms) {
    largest = largest >= v ? largest : v;  // a NaN in either becomes, or stays, one
    second = largest;
  }
  Powers<value_t>::take_root(&second);
  const value_t denominator = second * s.root + s.eps;
  return s.decay * p + s.rate * m / denominator;
}

enum class Momentum { kNone, kPlain, kNesterov };

template <Momentum kMomentum, typename value_t, typename scalar_t>
ZCLIP_HD value_t sgd_update(value_t g, value_t p, value_t& m, const UpdateScalars<scalar_t>& s) {
  value_t direction = g;
  if (kMomentum != Momentum::kNone) {
    m = s.keep * m + s.give * g;
    direction = kMomentum == Momentum::kNesterov ? g + s.momentum * m : m;
  }
  return s.decay * p + s.rate * direction;
}

// Lion, arXiv 2302.06675.
template <typename value_t, typename scalar_t>
ZCLIP_HD value_t lion_update(value_t g, value_t p, value_t& m, const UpdateScalars<scalar_t>& s) {
  const value_t c = m + (g - m) * s.weight1;
  const value_t zero = value_t{}, one = value_t{} + s.one;
  const value_t above = c > zero ? one : zero;
  const value_t below = c < zero ? one : zero;
  m = m + (g - m) * s.weight2;
  return s.decay * p + s.rate * (above - below);
}

// Which loop a tensor needs.
enum class Loop { kAdam, kAmsgrad, kSgd, kMomentum, kNesterov, kLion };

ZCLIP_HD Loop loop_of(Algorithm algorithm, int flags, bool has_first) {
  switch (algorithm) {
    case Algorithm::kAdam:
      return (flags & kAmsgrad) ? Loop::kAmsgrad : Loop::kAdam;
    case Algorithm::kSgd:
      return !has_first ? Loop::kSgd : (flags & kNesterov) ? Loop::kNesterov : Loop::kMomentum;
    default:
      return Loop::kLion;
  }
}

template <Loop kLoop, typename value_t, typename scalar_t>
ZCLIP_HD value_t loop_update(value_t g, value_t p, value_t& m, value_t& v, value_t& largest,
                             const UpdateScalars<scalar_t>& s) {
  if constexpr (kLoop == Loop::kAdam) return adam_update<false>(g, p, m, v, largest, s);
  if constexpr (kLoop == Loop::kAmsgrad) return adam_update<true>(g, p, m, v, largest, s);
  if constexpr (kLoop == Loop::kSgd) return sgd_update<Momentum::kNone>(g, p, m, s);
  if constexpr (kLoop == Loop::kMomentum) return sgd_update<Momentum::kPlain>(g, p, m, s);
  if constexpr (kLoop == Loop::kNesterov) return sgd_update<Momentum::kNesterov>(g, p, m, s);
  if constexpr (kLoop == Loop::kLion) return lion_update(g, p, m, s);
}

// Which moment is watched for NaN and Inf: where the updates would not tell. An infinite second
// moment makes an update of zero, and Lion takes the sign.
enum class Watched { kNone, kFirst, kSecond };

// What a loop reads and writes besides the parameter.
template <Loop kLoop>
struct LoopTraits {
  static constexpr bool kHasMaximum = kLoop == Loop::kAmsgrad;
  static constexpr bool kHasSecond = kLoop == Loop::kAdam || kHasMaximum;
  static constexpr bool kHasFirst = kLoop != Loop::kSgd;
  static constexpr Watched kWatched = kHasSecond             ? Watched::kSecond
                                      : kLoop == Loop::kLion ? Watched::kFirst
                                                             : Watched::kNone;
};

// The pattern of an infinity: that of every magnitude that is not finite is as large or larger.
template <typename value_t>
constexpr uint32_t kInfinite = 0x7f800000u;
template <>
constexpr uint64_t kInfinite<double> = 0x7ff0000000000000ull;

// 32 random bits that depend on nothing but the seed, the update, the tensor and the element, so
// that no order of work changes them. The mixer is that of lowbias32. word_t is uint32_t, or a
// vector of them.
template <typename word_t>
ZCLIP_HD word_t random_bits(uint32_t key, word_t element) {
  word_t x = element ^ key;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

ZCLIP_HD uint32_t rounding_key(uint64_t seed, double updates, int64_t tensor) {
  uint32_t key = random_bits(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  key = random_bits(key, static_cast<uint32_t>(static_cast<int64_t>(updates)));
  return random_bits(key, static_cast<uint32_t>(tensor));
}

// Rounds up with the probability of the part that is cut off. NaN and Inf stay what they are.
ZCLIP_HD void narrow_stochastically(float x, uint32_t random, Bfloat16* to) {
  if (!is_finite(x)) return narrow(x, to);
  to->bits = static_cast<uint16_t>((bits_of(x) + (random & 0xffffu)) >> 16);
}

}  // namespace zclip
