// Many tensors in one launch: addresses travel by value in the kernel's arguments, so there is no
// copy to the device to wait for and a graph can capture the call.

#pragma once

#include <cstdint>
#include <type_traits>

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

// Arguments are limited to 4,096 bytes, from CUDA 12.1 on, and with a driver of that age, to 32,764
// (takes_large_arguments). The small table is also the
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
  uint32_t row;          // in the whole list
  uint32_t first_chunk;  // of the same row
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
          (entry.row_and_format >> kFormatBits) + row, entry.first_chunk + row * per_row};
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

// Host side: puts `count` tensors into a table, the first of which has number `row`. Returns the
// number of the row behind them.
template <typename Table>
int64_t fill_table(Table& table, const DeviceTensor* tensors, int64_t count, int64_t row) {
  table.count = static_cast<int32_t>(count);
  table.chunks = 0;
  for (int64_t i = 0; i < count; ++i) {
    const DeviceTensor& tensor = tensors[i];
    table.entries[i] = {
        static_cast<char*>(tensor.address), tensor.row_len, table.chunks,
        static_cast<uint32_t>(row) << kFormatBits | static_cast<uint32_t>(tensor.format)};
    table.chunks += static_cast<uint32_t>(num_chunks(tensor));
    row += tensor.rows;
  }
  return row;
}

// Cuts a list into tables that fit a launch and calls launch(table, chunks before it, whether it is
// the last). An empty list is one empty table: somebody has to write the results.
template <typename Table, typename Launch>
LaunchError for_each_table_of(const DeviceTensor* tensors, int64_t count, Launch&& launch) {
  Table table;
  int64_t next = 0, row = 0, chunks_before = 0;
  for (;;) {
    const int64_t rest = count - next;
    const int64_t taken = rest < Table::kCapacity ? rest : Table::kCapacity;
    row = fill_table(table, tensors + next, taken, row);
    next += taken;
    const LaunchError error = launch(table, chunks_before, next == count);
    if (error != LaunchError{} || next == count) return error;
    chunks_before += table.chunks;
  }
}

// The same tables in reverse order, for what comes after a launch over all of them: the memory that
// was read last is still in the cache. Calls launch(table, its first row, the row behind it).
template <typename Table, typename Launch>
LaunchError for_each_table_backwards_of(const DeviceTensor* tensors, int64_t count,
                                        Launch&& launch) {
  Table table;
  int64_t end_row = 0;
  for (int64_t i = 0; i < count; ++i) end_row += tensors[i].rows;
  int64_t end = count;
  do {
    const int64_t first = end > 0 ? (end - 1) / Table::kCapacity * Table::kCapacity : 0;
    int64_t first_row = end_row;
    for (int64_t i = first; i < end; ++i) first_row -= tensors[i].rows;
    fill_table(table, tensors + first, end - first, first_row);
    const LaunchError error =
        launch(table, static_cast<uint32_t>(first_row), static_cast<uint32_t>(end_row));
    if (error != LaunchError{}) return error;
    end = first;
    end_row = first_row;
  } while (end > 0);
  return LaunchError{};
}

// Calls with_table(a table) of the kind that a list of so many tensors is best handed over in.
template <typename WithTable>
LaunchError choose_table(int64_t count, WithTable&& with_table) {
#if ZCLIP_LARGE_ARGUMENTS
  if (count > SmallTable::kCapacity && takes_large_arguments()) {
    return with_table(static_cast<LargeTable*>(nullptr));
  }
#endif
  return with_table(static_cast<SmallTable*>(nullptr));
}

template <typename Launch>
LaunchError for_each_table(const DeviceTensor* tensors, int64_t count, Launch&& launch) {
  return choose_table(count, [&](auto* table) {
    return for_each_table_of<std::remove_pointer_t<decltype(table)>>(tensors, count, launch);
  });
}

template <typename Launch>
LaunchError for_each_table_backwards(const DeviceTensor* tensors, int64_t count, Launch&& launch) {
  return choose_table(count, [&](auto* table) {
    using Table = std::remove_pointer_t<decltype(table)>;
    return for_each_table_backwards_of<Table>(tensors, count, launch);
  });
}

}  // namespace zclip::cuda
