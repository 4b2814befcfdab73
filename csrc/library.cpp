// Registers the compiled operators on torch's stable ABI: no PyInit and no pybind11, so that one
// abi3 wheel serves every torch from 2.10 on. Schemas are declared in zclip/schemas.

#include <torch/csrc/stable/library.h>

#include "cpu/cpu_path.h"
#include "cpu/ops.h"
#ifdef ZCLIP_WITH_CUDA
#include "cuda/register_ops.h"
#endif

namespace {

// Bits of zclip::native_features, read by zclip/backends/native.py.
enum Feature : int64_t { kUsesAvx2 = 1, kHasCuda = 2, kUsesAvx512 = 4 };

int64_t native_features() {
  int64_t features = zclip::cpu::use_avx2() ? kUsesAvx2 : 0;
  features |= zclip::cpu::use_avx512() ? kUsesAvx512 : 0;
#ifdef ZCLIP_WITH_CUDA
  features |= kHasCuda;
#endif
  return features;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zclip, CPU, m) {
  m.impl("grad_stats", TORCH_BOX(&zclip::cpu::grad_stats));
  m.impl("power_stats", TORCH_BOX(&zclip::cpu::power_stats));
  m.impl("scale_", TORCH_BOX(&zclip::cpu::scale_));
  m.impl("zero_nonfinite_", TORCH_BOX(&zclip::cpu::zero_nonfinite_));
  m.impl("clamp_", TORCH_BOX(&zclip::cpu::clamp_));
  m.impl("rule_", TORCH_BOX(&zclip::cpu::rule_));
  m.impl("clip_by_", TORCH_BOX(&zclip::cpu::clip_by_));
  m.impl("agc_", TORCH_BOX(&zclip::cpu::agc_));
  m.impl("watch_loss_", TORCH_BOX(&zclip::cpu::watch_loss_));
  m.impl("decide_by_", TORCH_BOX(&zclip::cpu::decide_by_));
  m.impl("clip_read_", TORCH_BOX(&zclip::cpu::clip_read_));
  m.impl("optim_update_", TORCH_BOX(&zclip::cpu::optim_update_));
  m.impl("make_plan", TORCH_BOX(&zclip::cpu::make_plan));
  m.impl("fused_step_", TORCH_BOX(&zclip::cpu::fused_step_));
  m.impl("fingerprint", TORCH_BOX(&zclip::cpu::fingerprint));
  m.impl("copy_and_hash_", TORCH_BOX(&zclip::cpu::copy_and_hash_));
  m.impl("read_probe", TORCH_BOX(&zclip::cpu::read_probe));
}

#ifdef ZCLIP_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(zclip, CUDA, m) { zclip::cuda::register_ops(m); }
#endif

STABLE_TORCH_LIBRARY_IMPL(zclip, CompositeExplicitAutograd, m) {
  m.impl("native_features", TORCH_BOX(&native_features));
  m.impl("drop_plan", TORCH_BOX(&zclip::cpu::drop_plan));
}
