// Python face of spelling_kernels.cuh; test_simt.py knows what the CUDA manual says they return.

#include "python_face.h"

#include "sample_kernels.cuh"
#include "spelling_kernels.cuh"

namespace {

using simt::at_address;
using zclip::cuda::launch;

void counters(unsigned blocks, unsigned threads, uintptr_t sum, uintptr_t ring, uintptr_t wide,
              uintptr_t highest, uintptr_t bits) {
  launch(samples::counters, blocks, threads, nullptr, at_address<int>(sum),
         at_address<unsigned>(ring), at_address<unsigned long long>(wide), at_address<int>(highest),
         at_address<unsigned>(bits));
}

}  // namespace

PYBIND11_MODULE(MODULE_NAME, module) {
  simt::bind_schedule(module);
  module.attr("ANSWERS") = samples::kAnswers;
  module.def("shuffles", [](uintptr_t out) {
    launch(samples::shuffles, 1, 64, nullptr, at_address<int>(out));
  });
  module.def("votes", [](unsigned threads, int stays, uintptr_t out) {
    launch(samples::votes, 1, threads, nullptr, stays, at_address<int>(out));
  });
  module.def("counters_kernel", &counters);
  module.def("places", [](uintptr_t out) {
    launch(samples::places, dim3(2, 3), dim3(4, 2, 2), nullptr, at_address<int>(out));
  });
  module.def("unwritten_shared", [](uintptr_t out) {
    launch(samples::unwritten_shared, 1, 64, nullptr, at_address<float>(out));
  });
  module.def("warp_rotate", [](uintptr_t x, uintptr_t out, bool forgets_syncwarp) {
    using samples::Bug;
    launch(forgets_syncwarp ? samples::warp_rotate<Bug::kMissingSyncwarp>
                            : samples::warp_rotate<Bug::kNone>,
           1, samples::kThreads, nullptr, at_address<float>(x), at_address<float>(out));
  });
  module.def("too_much_shared", [](uintptr_t out) {
    launch(samples::too_much_shared, 1, 32, nullptr, at_address<float>(out));
  });
  module.def("lanes_outside", [](unsigned threads, unsigned mask, uintptr_t out) {
    launch(samples::lanes_outside, 1, threads, nullptr, mask, at_address<int>(out));
  });
}
