// Every launch the CUDA backend makes, as plain functions over addresses. Knows neither CUDA nor
// torch, so that the binding compiles without the one and the tests run without the other.
//
// All memory is on the device and belongs to the caller. Nothing here waits, copies or allocates,
// so every call can be captured in a graph. Each returns 0 or the number of a CUDA error.

#pragma once

#include <cstdint>

#include "../math/watch_loss.h"
#include "device_tensor.h"
#include "rule.h"

namespace zclip::cuda {

struct Queue {
  void* stream;  // cudaStream_t
  int device;
};

// Bytes of scratch memory for a list, of any content, aligned to 16.
int64_t scratch_bytes(const DeviceTensor* tensors, int64_t count);

// Fills rows; applies the rule if there is one. One launch for up to 1,340 tensors.
int launch_grad_stats(const DeviceTensor* tensors, int64_t count, void* scratch, GradStats* rows,
                      const Rule* rule, const Judgement& out, Queue queue);
int launch_power_stats(const DeviceTensor* tensors, int64_t count, void* scratch, GradStats* rows,
                       double p, Queue queue);
// row_len in bytes; format of no meaning.
int launch_fingerprint(const DeviceTensor* tensors, int64_t count, void* scratch, int64_t* hashes,
                       Queue queue);

int launch_rule(const Rule& rule, const GradStats* rows, int64_t count, const Judgement& out,
                Queue queue);
int launch_watch_loss(const DeviceNumber& loss, const LossSettings& settings, double* state,
                      float* verdict, Queue queue);

// `zeroed`: rows whose bad elements become zero first, or null.
int launch_scale(const DeviceTensor* tensors, int64_t count, const double* coefs,
                 const GradStats* zeroed, Queue queue);
int launch_zero_nonfinite(const DeviceTensor* tensors, int64_t count, const GradStats* rows,
                          Queue queue);
int launch_clamp(const DeviceTensor* tensors, int64_t count, double limit, Queue queue);

struct AgcCall {
  double clip;
  double eps;
  OnNonFinite on_nonfinite;
  double* counters;
  GradStats* stats;
  double* per_tensor;  // scratch, two for each tensor
  double* row_coefs;   // scratch, one for each row
};
// Both lists are cut alike. Measures, judges and scales, in five launches.
int launch_agc(const DeviceTensor* grads, const DeviceTensor* weights, int64_t count,
               void* grad_scratch, void* weight_scratch, const AgcCall& call, const Judgement& out,
               Queue queue);

const char* error_text(int error);

}  // namespace zclip::cuda
