// Many tensors in one launch: addresses travel by value in the kernel's arguments, so there is no
// copy to the device to wait for and a graph can capture the call.

#pragma once

#include <cstdint>

#include "../math/grad_stats.h"
#include "device_tensor.h"
#include "target.cuh"
#include "vectors.cuh"

namespace zclip::cuda {

// One tensor. A row is what has one coefficient: the whole tensor, or for agc_ one index of its
// first dimension.
struct TableEntry {
  char* address;
  int64_t row_len;          // in elements
  uint32_t first_chunk;     // of this launch
  uint32_t row_and_format;  // number of its first row in the whole list, times 4, plus the format
};

constexpr int kFormatBits = 2;
constexpr int64_t kMaxRows = int64_t{1} << (32 - kFormatBits);

template <int kEntries>
struct TensorTable {
  static constexpr int kCapacity = kEntries;
  int32_t count;
  uint32_t chunks;  // of all tensors together
  TableEntry entries[kEntries];
};

// Arguments are limited to 4,096 bytes, from CUDA 12.1 on to 32,764. The small table is also the
// quicker one to hand over. 592 bytes are left for everything else.
using SmallTable = TensorTable<145>;
using LargeTable = TensorTable<1340>;
constexpr int kOtherArguments = 592;
static_assert(sizeof(SmallTable) + kOtherArguments <= 4096, "fits any launch");
static_assert(sizeof(LargeTable) + kOtherArguments <= 32764, "fits a launch since CUDA 12.1");

#if !defined(ZCLIP_LARGE_ARGUMENTS)
#if defined(CUDART_VERSION) && CUDART_VERSION < 12010
#define ZCLIP_LARGE_ARGUMENTS 0
#else
#define ZCLIP_LARGE_ARGUMENTS 1
#endif
#endif

// Where a chunk is and whose it is. Same in all threads of a block.
struct ChunkPlace {
  char* data;
  int len;  // in elements
  Format format;
  uint32_t row;         // in the whole list
  uint32_t next_chunk;  // first one that is not of the same row
};

__device__ __forceinline__ uint32_t chunks_per_row(int64_t row_len) {
  return static_cast<uint32_t>((row_len + kDeviceChunk - 1) / kDeviceChunk);
}

// The index of the last tensor that does not begin after the chunk, at least `low`; tensors without
// elements have no chunk.
template <typename Table>
__device__ __forceinline__ int index_of(const Table& table, uint32_t chunk, int low = 0) {
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__device__ __forceinline__ ChunkPlace place_in(const TableEntry& entry, uint32_t chunk) {
  const uint32_t in_tensor = chunk - entry.first_chunk, per_row = chunks_per_row(entry.row_len);
  const uint32_t row = in_tensor / per_row;  // of the tensor
  const int64_t begin = static_cast<int64_t>(in_tensor - row * per_row) * kDeviceChunk;
  const int64_t rest = entry.row_len - begin;
  const auto format = static_cast<Format>(entry.row_and_format & ((1u << kFormatBits) - 1));
  const int64_t first = row * entry.row_len + begin;
  return {entry.address + first * bytes_per_element(format),
          static_cast<int>(rest < kDeviceChunk ? rest : kDeviceChunk), format,
          (entry.row_and_format >> kFormatBits) + row, entry.first_chunk + (row + 1) * per_row};
}

template <typename Table>
__device__ __forceinline__ ChunkPlace place_of(const Table& table, uint32_t chunk) {
  return place_in(table.entries[index_of(table, chunk)], chunk);
}

// Finds the places of a block's chunks, one after the other, in one thread and a chunk ahead of the
// others: looking one up takes dozens of instructions that wait for each other. Most often the next
// chunk is of the same tensor.
template <typename Table>
class ChunkWalk {
 public:
  __device__ explicit ChunkWalk(const Table& table) : table_(table) {}

  // Nowhere, with no elements, if there are no more chunks. Chunks must ascend.
  __device__ ChunkPlace place_of(uint32_t chunk) {
    if (chunk >= table_.chunks) return {};
    const bool is_last = index_ + 1 == table_.count;
    if (!is_last && table_.entries[index_ + 1].first_chunk <= chunk) {
      index_ = index_of(table_, chunk, index_ + 1);
    }
    return place_in(table_.entries[index_], chunk);
  }

 private:
  const Table& table_;
  int index_ = 0;
};

// A place that another thread left in shared memory.
__device__ __forceinline__ ChunkPlace read_place(const ChunkPlace& shared) {
  ChunkPlace place = shared;
  place.data = in_global_memory(place.data);
  return place;
}

// The whole vectors of a chunk. As pieces_of, without a type.
__device__ __forceinline__ Run run_of(const ChunkPlace& place) {
  const auto size = static_cast<int>(bytes_per_element(place.format));
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(place.data) % kVectorBytes);
  const int to_go = (kVectorBytes - past) % kVectorBytes;
  const int bytes = place.len * size;
  return {reinterpret_cast<const uint4*>(place.data + to_go),
          bytes > to_go ? (bytes - to_go) / kVectorBytes : 0};
}

// Calls visit(pointer) with the chunk's address typed after its format.
template <typename Visit>
__device__ __forceinline__ auto visit_chunk(const ChunkPlace& place, Visit&& visit) {
  switch (place.format) {
    case Format::kFloat32:
      return visit(reinterpret_cast<float*>(place.data));
    case Format::kBfloat16:
      return visit(reinterpret_cast<Bfloat16*>(place.data));
    case Format::kFloat16:
      return visit(reinterpret_cast<Float16*>(place.data));
    default:
      return visit(reinterpret_cast<double*>(place.data));
  }
}

// Host side: cuts a list into tables that fit a launch and calls launch(table, chunks before it,
// whether it is the last). An empty list is one empty table: somebody has to write the results.
template <typename Table, typename Launch>
LaunchError for_each_table_of(const DeviceTensor* tensors, int64_t count, Launch&& launch) {
  Table table;
  int64_t next = 0, row = 0, chunks_before = 0;
  for (;;) {
    table.count = 0;
    table.chunks = 0;
    for (; next < count && table.count < Table::kCapacity; ++next) {
      const DeviceTensor& tensor = tensors[next];
      table.entries[table.count++] = {
          static_cast<char*>(tensor.address), tensor.row_len, table.chunks,
          static_cast<uint32_t>(row) << kFormatBits | static_cast<uint32_t>(tensor.format)};
      table.chunks += static_cast<uint32_t>(num_chunks(tensor));
      row += tensor.rows;
    }
    const LaunchError error = launch(table, chunks_before, next == count);
    if (error != LaunchError{} || next == count) return error;
    chunks_before += table.chunks;
  }
}

template <typename Launch>
LaunchError for_each_table(const DeviceTensor* tensors, int64_t count, Launch&& launch) {
#if ZCLIP_LARGE_ARGUMENTS
  if (count > SmallTable::kCapacity) return for_each_table_of<LargeTable>(tensors, count, launch);
#endif
  return for_each_table_of<SmallTable>(tensors, count, launch);
}

}  // namespace zclip::cuda
