// A clip rule with its settings, as it travels to the block that applies it. Knows neither CUDA nor
// torch.

#pragma once

#include <cstdint>

#include "../math/number.h"
#include "../math/rules.h"

namespace zclip::cuda {

// A number on the device, of any format; address null if there is none.
struct DeviceNumber {
  const void* address;
  Format format;
};

struct Rule {
  RuleId id;
  double* state;  // on the device; null counts nothing
  double settings[kMaxSettings];
  DeviceNumber loss;
};

// Where a rule writes, on the device.
struct Judgement {
  double* coefs;        // one per row of the stats
  float* verdict;       // [kNumVerdict]
  void* norm;           // one number, or null
  bool norm_is_double;  // else float
};

}  // namespace zclip::cuda
