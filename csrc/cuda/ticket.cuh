// Which block of a grid comes last, so that it can finish what the others began: no second launch
// and no waiting.

#pragma once

#include <cstdint>

#include "target.cuh"

namespace zclip::cuda {

// A ticket is 64 bits of scratch memory that nobody has to zero: the first block to arrive finds
// that the upper bits are not this launch's nonce, and begins a count of zero. Zeroing would be one
// more launch; a counter kept between calls would be shared by streams and captured graphs. Memory
// that holds the nonce by accident, one case in 2^48, would be taken for a count.
constexpr int kCountBits = 16;
constexpr uint64_t kCountMask = (uint64_t{1} << kCountBits) - 1;
constexpr int64_t kMaxBlocks = static_cast<int64_t>(kCountMask);

struct Ticket {
  unsigned long long* word;
  uint64_t nonce;  // 48 bits, different for every call
};

// Returned to every thread: true in the block whose threads all arrive here last. That block then
// sees everything that thread 0 of each block wrote before. Leaves the word at 0, so that a graph
// can be replayed.
__device__ __forceinline__ bool is_last_block(const Ticket& ticket) {
  ZCLIP_SHARED(bool, is_last, 1);
  if (threadIdx.x == 0) {
    // Read before the fence, so that it comes before the last block's reset.
    const unsigned long long seen = __ldcg(ticket.word);
    __threadfence();  // what this block wrote comes before its arrival
    // Of the blocks that see old memory one succeeds. To the others a failure proves that the count
    // has begun, so nobody tries twice: with hundreds of blocks that would take a round trip each.
    if (seen >> kCountBits != ticket.nonce) {
      atomicCAS(ticket.word, seen, static_cast<unsigned long long>(ticket.nonce << kCountBits));
    }
    const unsigned long long counted = atomicAdd(ticket.word, 1ull) + 1;
    is_last[0] = (counted & kCountMask) == gridDim.x;
    __threadfence();  // what the others wrote comes before what is read from here on
    if (is_last[0]) *ticket.word = 0;
  }
  __syncthreads();
  return is_last[0];
}

}  // namespace zclip::cuda
