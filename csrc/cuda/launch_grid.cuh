// How many blocks a launch gets: as many as the device holds at once, and no more than there is
// work for. Results never depend on it.

#pragma once

#include <atomic>
#include <cstdint>

#include "target.cuh"
#include "ticket.cuh"

namespace zclip::cuda {

// With 512 threads of at most 64 registers, two blocks fit every multiprocessor since sm_75, and
// their 64 KB of loads in flight are more than memory latency times bandwidth on any of them.
constexpr int kBlocksPerMultiprocessor = 2;

#if defined(ZCLIP_SIMT)

inline int64_t emulated_multiprocessors = 2;
inline int64_t multiprocessors(int /*device*/) { return emulated_multiprocessors; }

#else

// Asks the runtime once per device; does not touch the device.
inline int64_t multiprocessors(int device) {
  constexpr int kRemembered = 64;
  static std::atomic<int> known[kRemembered];  // two threads may both ask; the answer is the same
  if (device >= 0 && device < kRemembered && known[device] > 0) return known[device];
  int count = 0;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
    return 1;
  }
  if (device >= 0 && device < kRemembered) known[device] = count;
  return count;
}

#endif

inline unsigned blocks_for(int64_t work_items, int device) {
  const int64_t resident = multiprocessors(device) * kBlocksPerMultiprocessor;
  const int64_t most = resident < kMaxBlocks ? resident : kMaxBlocks;
  const int64_t wanted = work_items < most ? work_items : most;
  return static_cast<unsigned>(wanted < 1 ? 1 : wanted);
}

}  // namespace zclip::cuda
