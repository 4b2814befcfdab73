// The two things that nvcc and the emulator in tests/simt spell differently: a shared array and a
// launch. Kernels and launchers include this and are otherwise plain CUDA.

#pragma once

#if defined(ZCLIP_SIMT)

#include "simt.h"

#define ZCLIP_SHARED(type, name, count)                                          \
  static const ::simt::SharedName name##_shared_name{#name, __FILE__, __LINE__}; \
  type(&name)[count] = ::simt::shared_array<type, (count)>(name##_shared_name)

namespace zclip::cuda {

template <typename T>
T* in_global_memory(T* pointer) {
  return pointer;
}

inline bool emulates_old_driver = false;
inline bool takes_large_arguments() { return !emulates_old_driver; }

using Stream = void*;
using LaunchError = int;  // always 0: the emulator throws

template <typename... Params, typename... Args>
LaunchError launch(void (*kernel)(Params...), dim3 grid, dim3 block, Stream /*stream*/,
                   const Args&... args) {
  ::simt::launch(kernel, grid, block, args...);
  return 0;
}

}  // namespace zclip::cuda

#else

#include <cuda_runtime.h>

#define ZCLIP_SHARED(type, name, count) __shared__ type name[count]

namespace zclip::cuda {

// Says so of a pointer that was read from shared memory: where the compiler does not know it, loads
// have to find out.
template <typename T>
__device__ __forceinline__ T* in_global_memory(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Whether the driver launches kernels with more than 4 KB of arguments: since CUDA 12.1. A runtime
// of CUDA 12 also works with drivers of 12.0. Asked once.
inline bool takes_large_arguments() {
  static const bool takes = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return takes;
}

using Stream = cudaStream_t;
using LaunchError = cudaError_t;

// Does not wait for the kernel; reports only what is wrong with the launch itself.
template <typename... Params, typename... Args>
LaunchError launch(void (*kernel)(Params...), dim3 grid, dim3 block, Stream stream,
                   const Args&... args) {
  // clang-format off
  kernel<<<grid, block, 0, stream>>>(args...);
  // clang-format on
  return cudaGetLastError();
}

}  // namespace zclip::cuda

#endif
