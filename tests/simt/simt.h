// Runs CUDA kernels on the CPU, one fiber per thread, so that a machine with no GPU can execute
// them under many schedules and under sanitizers. It is no performance model, and knows of weak
// memory only what fences.h says. Kernels get it through csrc/cuda/target.cuh.
//
//   simt::set_schedule({simt::Order::kRandom, seed});
//   simt::launch(kernel<float>, blocks, threads, arguments...);

#pragma once

#include "intrinsics.h"
#include "vector_types.h"

#include "atomics.h"
#include "collectives.h"
#include "launch.h"

namespace simt {

template <typename T, size_t kCount>
T (&shared_array(const SharedName& name))
[kCount] {
  static_assert(std::is_trivially_default_constructible_v<T>, "as __shared__ demands");
  static_assert(alignof(T) <= kSharedAlignment);
  Unwatched unwatched;
  void* array = running.thread->block->shared.find_or_place(name, sizeof(T) * kCount);
  if (!array) fail(std::string("no room in 48 KB of shared memory for ") + name.name);
  return *static_cast<T(*)[kCount]>(array);
}

}  // namespace simt
