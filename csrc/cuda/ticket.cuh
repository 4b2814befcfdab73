// Which block of a grid comes last, so that it can finish what the others began: no second launch
// and no waiting.

#pragma once

#include <cstdint>

#include "target.cuh"

namespace zclip::cuda {

// A ticket is 64 bits of scratch memory that nobody has to zero: the first block to arrive finds
// that the upper bits are not this launch's nonce and starts counting at one. Zeroing would be one
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
    __threadfence();  // what this block wrote comes before its arrival
    unsigned long long seen = 0, counted;
    for (;;) {
      const bool has_begun = seen >> kCountBits == ticket.nonce;
      counted = has_begun ? seen + 1 : ticket.nonce << kCountBits | 1;
      const unsigned long long found = atomicCAS(ticket.word, seen, counted);
      if (found == seen) break;
      seen = found;
    }
    is_last[0] = (counted & kCountMask) == gridDim.x;
    __threadfence();  // what the others wrote comes before what is read from here on
    if (is_last[0]) *ticket.word = 0;
  }
  __syncthreads();
  return is_last[0];
}

}  // namespace zclip::cuda
