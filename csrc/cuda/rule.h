// A clip rule with its settings, as it travels to the block that applies it. Knows neither CUDA nor
// torch.

#pragma once

#include <cstdint>

#include "../math/adagc.h"
#include "../math/auto_clip.h"
#include "../math/global_norm.h"
#include "../math/number.h"
#include "../math/spike_skip.h"
#include "../math/zclip.h"

namespace zclip::cuda {

struct GlobalNormSettings {
  double max_norm;
  NonFinite nonfinite;
};

struct AutoClipSettings {
  double percentile;
  int64_t history;
  OnNonFinite on_nonfinite;
};

// A number on the device, of any format; address null if there is none.
struct DeviceNumber {
  const void* address;
  Format format;
};

struct Rule {
  enum class Kind : int32_t { kGlobalNorm, kZClip, kAdaGc, kSpikeSkip, kAutoClip };
  Kind kind;
  double* state;  // on the device
  union {
    GlobalNormSettings global_norm;
    ZClipSettings zclip;
    AdaGcSettings adagc;
    SpikeSkipSettings spike_skip;
    AutoClipSettings auto_clip;
  };
  DeviceNumber loss;  // of spike_skip
};

// Where a rule writes, on the device.
struct Judgement {
  double* coefs;        // one per row of the stats
  float* verdict;       // [kNumVerdict]
  void* norm;           // one number, or null
  bool norm_is_double;  // else float
};

}  // namespace zclip::cuda
