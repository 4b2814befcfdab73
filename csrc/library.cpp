// Registers the compiled operators on torch's stable ABI: no PyInit and no pybind11, so that one
// abi3 wheel serves every torch from 2.10 on. Schemas are declared in zclip/schemas.py.

#include <torch/csrc/stable/library.h>

#include "cpu/cpu_path.h"
#include "cpu/ops.h"

namespace {

// Bits of zclip::native_features, read by zclip/backends/native.py.
enum Feature : int64_t { kUsesAvx2 = 1, kHasCuda = 2 };

int64_t native_features() {
  int64_t features = zclip::cpu::use_avx2() ? kUsesAvx2 : 0;
#ifdef ZCLIP_WITH_CUDA
  features |= kHasCuda;
#endif
  return features;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(zclip, CPU, m) {
  m.impl("grad_stats", TORCH_BOX(&zclip::cpu::grad_stats));
  m.impl("power_stats", TORCH_BOX(&zclip::cpu::power_stats));
  m.impl("global_norm_", TORCH_BOX(&zclip::cpu::global_norm_));
  m.impl("scale_", TORCH_BOX(&zclip::cpu::scale_));
  m.impl("zero_nonfinite_", TORCH_BOX(&zclip::cpu::zero_nonfinite_));
  m.impl("clamp_", TORCH_BOX(&zclip::cpu::clamp_));
  m.impl("clip_by_global_norm_", TORCH_BOX(&zclip::cpu::clip_by_global_norm_));
  m.impl("read_probe", TORCH_BOX(&zclip::cpu::read_probe));
}

STABLE_TORCH_LIBRARY_IMPL(zclip, CompositeExplicitAutograd, m) {
  m.impl("native_features", TORCH_BOX(&native_features));
}
