// One kernel per family of CUDA names; each writes what the names returned, and test_simt.py
// knows what the CUDA manual says they return.

#pragma once

#include "../../csrc/cuda/target.cuh"

namespace samples {

constexpr int kAnswers = 12;  // columns that each thread writes

// grid: one block of two warps. Row threadIdx.x of out.
__global__ void shuffles(int* out) {
  int* row = out + threadIdx.x * kAnswers;
  const int lane = threadIdx.x % 32;
  row[0] = __shfl_down_sync(0xffffffffu, lane, 3);
  row[1] = __shfl_down_sync(0xffffffffu, lane, 3, 8);
  row[2] = __shfl_up_sync(0xffffffffu, lane, 3);
  row[3] = __shfl_xor_sync(0xffffffffu, lane, 16);
  row[4] = __shfl_xor_sync(0xffffffffu, lane, 5, 4);
  row[5] = __shfl_sync(0xffffffffu, lane, 7);
  row[6] = __shfl_sync(0xffffffffu, lane, 9, 8);
  row[7] = static_cast<int>(__ballot_sync(0xffffffffu, lane % 3 == 0));
  row[8] = __any_sync(0xffffffffu, threadIdx.x == 40);
  row[9] = __all_sync(0xffffffffu, threadIdx.x != 40);
  if (lane < 8) {  // a mask of some lanes, in a branch only they take
    row[10] = static_cast<int>(__ballot_sync(0xffu, lane % 2));
    __syncwarp(0xffu);
  } else {
    row[10] = static_cast<int>(__ballot_sync(0xffffff00u, 1));
  }
  row[11] = static_cast<int>(__shfl_xor_sync(0xffffffffu, lane + 0.5, 1) * 2.0);
}

// grid: one block of any size. Threads from `stays` on leave first: a barrier does not wait for
// them.
__global__ void votes(int stays, int* out) {
  const int thread = threadIdx.x;
  if (thread >= stays) return;
  int* row = out + thread * kAnswers;
  row[0] = __syncthreads_or(thread == stays - 1);
  row[1] = __syncthreads_or(0);
  row[2] = __syncthreads_and(thread >= 0);
  row[3] = __syncthreads_and(thread != 0);
  row[4] = __syncthreads_count(thread % 2);
}

// grid: any. Every thread acts on the same few counters.
__global__ void counters(int* sum, unsigned* ring, unsigned long long* wide, int* highest,
                         unsigned* bits) {
  const int id = blockIdx.x * blockDim.x + threadIdx.x;
  atomicAdd(sum, id % 2 ? 3 : -1);
  atomicInc(ring, 6);
  atomicAdd(wide, 1ull << 32);
  atomicMax(highest, id);
  atomicOr(bits, 1u << id % 32);
}

// grid: (2, 3) blocks of (4, 2, 2) threads. Each thread marks its own cell, once.
__global__ void places(int* out) {
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1;
}

// grid: one block of two warps. Shared memory begins as NaN; a float4
// array lies on a 16-byte boundary.
__global__ void unwritten_shared(float* out) {
  ZCLIP_SHARED(float, tile, 64);
  ZCLIP_SHARED(float4, vectors, 2);
  out[threadIdx.x] = tile[threadIdx.x];
  if (threadIdx.x == 0) vectors[1] = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
  __syncthreads();
  if (threadIdx.x == 0) out[64] = __fadd_rn(vectors[1].w, __fmul_rn(vectors[1].z, 2.0f));
}

// More than the 48 KB that a block may have without asking. nvcc refuses it too.
#if defined(ZCLIP_SIMT)
__global__ void too_much_shared(float* out) {
  ZCLIP_SHARED(float, first, 8 * 1024);
  ZCLIP_SHARED(float, second, 5 * 1024);
  out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
}
#endif

// grid: one block of at most a warp. Wrong unless mask names exactly the threads that exist.
__global__ void lanes_outside(unsigned mask, int* out) {
  out[threadIdx.x] = __shfl_xor_sync(mask, static_cast<int>(threadIdx.x), 1);
}

}  // namespace samples
