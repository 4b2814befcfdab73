// The launchers of csrc/cuda as plain C functions over arrays, for ctypes. Linked with the object
// that nvcc made and with tests/fake_cudart.cpp, whose hook runs each kernel as PTX.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../csrc/cuda/launchers.h"

using namespace zclip;
using cuda::DeviceTensor;

namespace {

const cuda::Queue kQueue = {nullptr, 0};

std::vector<DeviceTensor> list_of(void* const* addresses, const int64_t* rows,
                                  const int64_t* row_lens, const int* formats, int64_t count) {
  std::vector<DeviceTensor> list(count);
  for (int64_t i = 0; i < count; ++i) {
    list[i] = {addresses[i], row_lens[i], rows[i], static_cast<Format>(formats[i])};
  }
  return list;
}

cuda::Rule rule_of(int id, double* state, const double* settings, int64_t num_settings,
                   const void* loss, int loss_format) {
  cuda::Rule rule = {};
  rule.id = static_cast<RuleId>(id);
  rule.state = state;
  std::copy_n(settings, num_settings, rule.settings);
  rule.loss = {loss, static_cast<Format>(loss_format)};
  return rule;
}

}  // namespace

// The first five arguments are a list of tensors.
#define LIST                                                                                      \
  void *const *addresses, const int64_t *row_counts, const int64_t *row_lens, const int *formats, \
      int64_t count
#define LISTED list_of(addresses, row_counts, row_lens, formats, count)

extern "C" {

int64_t ptx_scratch_bytes(LIST) { return cuda::scratch_bytes(LISTED.data(), count); }

int ptx_grad_stats(LIST, void* scratch, double* rows) {
  return cuda::launch_grad_stats(LISTED.data(), count, scratch, reinterpret_cast<GradStats*>(rows),
                                 nullptr, {}, kQueue);
}

int ptx_clip_by(LIST, void* scratch, double* rows, int id, double* state, const double* settings,
                int64_t num_settings, const void* loss, int loss_format, double* coefs,
                float* verdict, void* norm, int norm_is_double, int drops) {
  const auto list = LISTED;
  const auto rule = rule_of(id, state, settings, num_settings, loss, loss_format);
  auto* stats = reinterpret_cast<GradStats*>(rows);
  if (int error = cuda::launch_grad_stats(list.data(), count, scratch, stats, &rule,
                                          {coefs, verdict, norm, norm_is_double != 0}, kQueue)) {
    return error;
  }
  return cuda::launch_scale(list.data(), count, coefs, drops ? stats : nullptr, kQueue);
}

int ptx_rule(int id, double* state, const double* settings, int64_t num_settings, const void* loss,
             int loss_format, const double* rows, int64_t count, double* coefs, float* verdict) {
  const auto rule = rule_of(id, state, settings, num_settings, loss, loss_format);
  return cuda::launch_rule(rule, reinterpret_cast<const GradStats*>(rows), count,
                           {coefs, verdict, nullptr, false}, kQueue);
}

int ptx_power_stats(LIST, void* scratch, double* rows, double p) {
  return cuda::launch_power_stats(LISTED.data(), count, scratch, reinterpret_cast<GradStats*>(rows),
                                  p, kQueue);
}

int ptx_scale(LIST, const double* coefs) {
  return cuda::launch_scale(LISTED.data(), count, coefs, nullptr, kQueue);
}

int ptx_zero_nonfinite(LIST, const double* rows) {
  return cuda::launch_zero_nonfinite(LISTED.data(), count, reinterpret_cast<const GradStats*>(rows),
                                     kQueue);
}

int ptx_clamp(LIST, double limit) {
  return cuda::launch_clamp(LISTED.data(), count, limit, kQueue);
}

int ptx_fingerprint(LIST, void* scratch, int64_t* hashes) {
  return cuda::launch_fingerprint(LISTED.data(), count, scratch, hashes, kQueue);
}

int ptx_agc(LIST, void* const* weights, const int* weight_formats, void* grad_scratch,
            void* weight_scratch, double clip, double eps, int on_nonfinite, double* counters,
            double* rows, double* per_tensor, double* row_coefs, double* coefs, float* verdict,
            void* norm, int norm_is_double) {
  const auto grads = LISTED;
  const auto params = list_of(weights, row_counts, row_lens, weight_formats, count);
  const cuda::AgcCall call = {clip,
                              eps,
                              static_cast<OnNonFinite>(on_nonfinite),
                              counters,
                              reinterpret_cast<GradStats*>(rows),
                              per_tensor,
                              row_coefs};
  return cuda::launch_agc(grads.data(), params.data(), count, grad_scratch, weight_scratch, call,
                          {coefs, verdict, norm, norm_is_double != 0}, kQueue);
}

int ptx_watch_loss(const void* loss, int loss_format, double factor, int64_t rising_steps,
                   double decay, int64_t warmup_steps, double* state, float* verdict) {
  return cuda::launch_watch_loss({loss, static_cast<Format>(loss_format)},
                                 {factor, rising_steps, decay, warmup_steps}, state, verdict,
                                 kQueue);
}

}  // extern "C"
