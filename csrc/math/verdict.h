// What a clip rule reports about one step. zclip/layout.py states the same columns and flags;
// tests/test_layers.py compares the two.

#pragma once

namespace zclip {

// Elements of the float32 [kNumVerdict] verdict.
enum VerdictColumn : int {
  kBlocked = 0,  // exactly 0 or 1: torch's fused optimizers test found_inf == 1
  kFlags,        // bits of VerdictFlag
  kNorm,
  kClippedNorm,
  kZ,
  kThreshold,
  kMean,
  kStd,
  kLoss,
  kLossRatio,
  kWorst,  // index of the tensor to blame: the first with a bad element, else the largest norm
  kClips,
  kSkips,
  kStep,
  kNumVerdict
};

enum VerdictFlag : int {
  kHasNan = 1,
  kHasInf = 2,
  kOverflow = 4,  // every element is finite and the norm is not, in float32
  kClipped = 8,
  kSpike = 16,    // the rule found the norm out of the ordinary
  kLossNan = 32,  // NaN or Inf
  kLossSpike = 64,
  kLossRising = 128,
  kDesync = 256,  // ranks disagree about the step; set where ranks meet, by no rule
};

// What to do with a step whose gradients hold NaN or Inf.
enum class NonFinite : int {
  kPropagate = 0,  // as torch does: the norm is NaN or Inf and so becomes the gradient
  kSkip = 1,       // refuse: every gradient becomes zero and blocked is 1
  kZero = 2,       // drop the bad elements, clip the rest by the norm of the rest
  kError = 3,      // touch nothing, blocked is 1, and the host raises
};

// What an adaptive rule does with such a step, or with an overflow.
enum class OnNonFinite : int {
  kSkip = 0,      // refuse it and learn nothing from it
  kOfficial = 1,  // what the published code does, also where that poisons its statistics for good
};

// Factors for scale_. Exactly kKeep leaves a gradient bitwise untouched and unread; kRefuse writes
// zeros without multiplying, because 0 * Inf is NaN.
constexpr double kKeep = 1.0;
constexpr double kRefuse = -1.0;

}  // namespace zclip
