// Gives a CPU-only torch a CUDA device guard that does nothing, so that fake CUDA tensors pass
// through every op. Built by tests/fake_cuda.py.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct NoGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, new NoGuard());

}  // namespace
