// What the block that comes last does with the slots of each tensor: most tensors have few, for a
// warp, and a flat buffer of all parameters has hundreds of thousands, for the whole block.

#pragma once

#include "block_join.cuh"
#include "tensor_table.cuh"

namespace zclip::cuda {

// A tensor of more slots, 67 million elements, is finished by the whole block. The order of its sum
// depends on this, so it is the same on every device. Tests choose fewer, to have small tensors.
#if defined(ZCLIP_SLOTS_PER_WARP)
constexpr uint32_t kSlotsPerWarp = ZCLIP_SLOTS_PER_WARP;
#else
constexpr uint32_t kSlotsPerWarp = 2048;
#endif

// Calls finish<Crew>(entry, end of its slots) for every tensor of the table, with a warp or with
// the block. All threads of the block must call it.
template <typename Table, typename Finish>
__device__ __forceinline__ void for_each_tensor(const Table& table, const Finish& finish) {
  ZCLIP_SHARED(uint16_t, large, Table::kCapacity);
  ZCLIP_SHARED(unsigned, num_large, 1);
  if (threadIdx.x == 0) num_large[0] = 0;
  __syncthreads();
  for (int t = threadIdx.x / kWarpSize; t < table.count; t += kWarps) {
    const TableEntry& entry = table.entries[t];
    const uint32_t slots = chunks_per_row(entry.row_len);
    if (slots <= kSlotsPerWarp) {
      finish.template operator()<WarpCrew>(entry, entry.first_chunk + slots);
    } else if (WarpCrew::member() == 0) {
      large[atomicAdd(num_large, 1u)] = static_cast<uint16_t>(t);
    }
  }
  __syncthreads();
  for (unsigned n = 0; n < num_large[0]; ++n) {
    const TableEntry& entry = table.entries[large[n]];
    finish.template operator()<BlockCrew>(entry, entry.first_chunk + chunks_per_row(entry.row_len));
  }
}

}  // namespace zclip::cuda
