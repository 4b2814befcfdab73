// The launch of an optimizer update, as a plain function over addresses. Knows neither CUDA nor
// torch; see launchers.h.

#pragma once

#include <cstdint>

#include "../math/optim.h"
#include "launchers.h"

namespace zclip::cuda {

// A parameter with its state. All lie in memory alike.
struct UpdateTensor {
  void* p;
  const void* g;  // null if there is none in this step: the parameter is left alone
  void* m;        // these in float32, for float64 parameters in float64; null if there are none
  void* v;
  void* largest;
  void* step;  // one number
  int64_t numel;
  Format param_format;
  Format grad_format;
  bool step_is_double;
  int32_t group;
};

// Everything else about an update. Addresses may be null where zclip/schemas allows empty tensors.
struct UpdateCall {
  Algorithm algorithm;
  const double* settings;  // on the host, kNumOptimSettings for each group
  int64_t num_groups;
  int64_t* ledger;
  const double* coefs;
  const float* blocked;  // one number, or a verdict if skip_flags is not 0
  int skip_flags;
  DeviceNumber grad_scale;
  const double* rates;
  uint64_t seed;
  bool telemetry;
  double* rows;
  float* summary;
};

// Bytes of scratch memory, of any content, aligned to 16.
int64_t update_scratch_bytes(const UpdateTensor* tensors, int64_t count);

// One launch for up to 400 tensors in up to 8 groups. Where float64 parameters stand beside others
// in the list there is one more at each change.
int launch_optim_update(const UpdateTensor* tensors, int64_t count, const UpdateCall& call,
                        void* scratch, Queue queue);

}  // namespace zclip::cuda
