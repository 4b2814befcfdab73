// fingerprint: a 64-bit hash of each tensor's bytes. A sum of integers, so its order is free. Its
// tables count in bytes: a row is a tensor, kDeviceChunk bytes are a chunk.

#pragma once

#include "../math/fingerprint.h"
#include "finish.cuh"
#include "launch_grid.cuh"
#include "tensor_table.cuh"
#include "ticket.cuh"
#include "vectors.cuh"

namespace zclip::cuda {

using Hash = unsigned long long;

__device__ __forceinline__ uint64_t key_of(int64_t word) {
  return (static_cast<uint64_t>(word) + 1) * kGolden;
}

// The word at `byte`, with zeros for what lies behind `end`; at any alignment.
__device__ __forceinline__ uint64_t word_at(const unsigned char* data, int64_t byte, int64_t end) {
  uint64_t word = 0;
  for (int i = 0; i < kBytesPerWord && byte + i < end; ++i) {
    word |= static_cast<uint64_t>(data[byte + i]) << (8 * i);
  }
  return word;
}

// This thread's share of the hash of the bytes from begin to end, which begin at a word.
__device__ __forceinline__ Hash hash_share(const unsigned char* data, int64_t begin, int64_t end) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
  const int vectors = is_aligned ? static_cast<int>((end - begin) / kVectorBytes) : 0;
  Hash hash = 0;
  for (int first = threadIdx.x; first < vectors; first += kInFlight * kThreads) {
    ulonglong2 words[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int v = first + k * kThreads;
      if (v < vectors) words[k] = reinterpret_cast<const ulonglong2*>(data + begin)[v];
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int v = first + k * kThreads;
      if (v >= vectors) break;
      const uint64_t key = key_of(begin / kBytesPerWord + 2 * static_cast<int64_t>(v));
      hash += mix(words[k].x, key) + mix(words[k].y, key + kGolden);
    }
  }
  const int64_t rest = begin + static_cast<int64_t>(vectors) * kVectorBytes;
  for (int64_t byte = rest + threadIdx.x * kBytesPerWord; byte < end;
       byte += kThreads * kBytesPerWord) {
    hash += mix(word_at(data, byte, end), key_of(byte / kBytesPerWord));
  }
  return hash;
}

struct FinishHash {
  const Hash* slots;
  Hash* hashes;

  template <typename Crew>
  __device__ __forceinline__ void operator()(const TableEntry& entry, uint32_t end) const {
    Hash hash = 0;
    for (uint32_t c = entry.first_chunk + Crew::member(); c < end; c += Crew::kSize) {
      hash += __ldcg(slots + c);
    }
    hash = Crew::template join<Add>(hash);
    if (Crew::member() == 0) {
      hashes[entry.row_and_format >> kFormatBits] =
          hash + mix_length(static_cast<uint64_t>(entry.row_len));
    }
  }
};

// grid: any number of blocks; each takes every gridDim.x-th chunk. Thread 0 writes slots[chunk];
// the last block adds them up and writes hashes.
template <typename Table>
__global__ void __launch_bounds__(kThreads)
    fingerprint_partials(const Table __grid_constant__ table, Hash* slots, const Ticket ticket,
                         Hash* hashes) {
  for (uint32_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
    const TableEntry& entry = table.entries[index_of(table, c)];
    const int64_t begin = static_cast<int64_t>(c - entry.first_chunk) * kDeviceChunk;
    const int64_t end = begin + kDeviceChunk < entry.row_len ? begin + kDeviceChunk : entry.row_len;
    const Hash hash =
        block_join<Add>(hash_share(reinterpret_cast<unsigned char*>(entry.address), begin, end));
    if (threadIdx.x == 0) slots[c] = hash;
  }
  if (!is_last_block(ticket)) return;
  for_each_tensor(table, FinishHash{slots, hashes});
}

}  // namespace zclip::cuda
