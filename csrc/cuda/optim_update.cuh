// Pass 2 of a fused step: reads gradients, parameters and state once, writes parameters and state,
// and in the block that comes last makes rows of telemetry out of the chunks' slots. One launch.

#pragma once

#include "block_join.cuh"
#include "launch_grid.cuh"
#include "optim_update.h"
#include "ticket.cuh"
#include "update_elements.cuh"

namespace zclip::cuda {

constexpr int kMaxGroups = 8;  // of one launch

// One tensor of a launch.
struct UpdateEntry {
  char* p;
  const char* g;
  char* m;
  char* v;
  char* largest;
  void* step;
  int64_t numel;
  uint32_t first_chunk;  // of this launch
  uint32_t row;          // in the whole list
  uint8_t param_format;
  uint8_t grad_format;
  uint8_t step_is_double;
  uint8_t group;  // of this launch
};

template <int kEntries>
struct UpdateTable {
  static constexpr int kCapacity = kEntries;
  int32_t count;
  uint32_t chunks;
  double settings[kMaxGroups][kNumOptimSettings];
  int32_t groups[kMaxGroups];  // their numbers in the whole list
  UpdateEntry entries[kEntries];
};

// As for tensor_table.cuh: arguments are limited to 4,096 bytes, from CUDA 12.1 on to 32,764.
using SmallUpdateTable = UpdateTable<44>;
using LargeUpdateTable = UpdateTable<400>;

struct UpdateArguments {
  Algorithm algorithm;
  bool telemetry;
  bool is_last_table;
  int64_t total;  // tensors of all launches
  int64_t* ledger;
  const double* coefs;
  const float* blocked;  // one number, or a verdict if skip_flags is not 0
  int skip_flags;
  DeviceNumber grad_scale;
  const double* rates;
  uint64_t seed;
  double* rows;
  float* summary;
};
static_assert(sizeof(SmallUpdateTable) + sizeof(UpdateArguments) + 32 <= 4096, "fits any launch");
static_assert(sizeof(LargeUpdateTable) + sizeof(UpdateArguments) + 32 <= 32764, "CUDA 12.1");

// What an update of one chunk found; all of them sums.
struct UpdateSums {
  static constexpr int kDoubles = 5;  // weights, updates, bad weights, firsts and seconds
  static constexpr int kWords = kNumPatterns;
  double numbers[kDoubles];
  unsigned long long words[kWords];
};

__device__ __forceinline__ bool is_multiple(const void* address, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
}

// The number that gradients are divided by.
__device__ __forceinline__ double scale_of(const DeviceNumber& number) {
  if (number.address == nullptr) return 1.0;
  switch (number.format) {
    case Format::kFloat32:
      return *static_cast<const float*>(number.address);
    case Format::kBfloat16:
      return widen(*static_cast<const Bfloat16*>(number.address));
    case Format::kFloat16:
      return widen(*static_cast<const Float16*>(number.address));
    default:
      return *static_cast<const double*>(number.address);
  }
}

// How many updates a tensor has had. Read before the last block counts this one.
__device__ __forceinline__ double updates_of(const UpdateEntry& entry, const int64_t* ledger) {
  if (entry.step == nullptr) {
    return static_cast<double>(ledger[int64_t{entry.row} * kNumLedger + kUpdates]);
  }
  return entry.step_is_double ? *static_cast<const double*>(entry.step)
                              : static_cast<double>(*static_cast<const float*>(entry.step));
}

template <typename value_t, typename Table>
__device__ __forceinline__ void prepare(const Table& table, const UpdateEntry& entry,
                                        const UpdateArguments& call, ChunkWork<value_t>* work) {
  const double* settings = table.settings[entry.group];
  const double updates = updates_of(entry, call.ledger);
  const double lr = call.rates == nullptr ? settings[kLr] : call.rates[table.groups[entry.group]];
  const double coef = call.coefs == nullptr ? kKeep : call.coefs[entry.row];
  const double scale = scale_of(call.grad_scale);
  work->scalars = scalars_of<value_t>(call.algorithm, settings, lr, updates);
  work->flags = static_cast<int>(settings[kOptimFlags]);
  work->coef = ((work->flags & kMaximize) ? -coef : coef) / scale;
  if (coef == kRefuse) {
    work->coef = 0.0;
    work->flags |= kDropNonFinite;
  }
  work->key = rounding_key(call.seed, updates, entry.row);
}

template <typename T>
__device__ __forceinline__ T* moved(T* data, int64_t bytes) {
  return data == nullptr ? nullptr : in_global_memory(data) + bytes;
}

// All threads of the block; what it found is each thread's own.
template <typename value_t, typename Table>
__device__ __forceinline__ ThreadSums<value_t> update_chunk(const Table& table,
                                                            const UpdateEntry& entry,
                                                            uint32_t chunk,
                                                            const UpdateArguments& call) {
  ZCLIP_SHARED(ChunkWork<value_t>, shared_work, 1);
  if (threadIdx.x == 0) prepare(table, entry, call, shared_work);
  __syncthreads();
  const ChunkWork<value_t> work = shared_work[0];
  const auto param_format = static_cast<Format>(entry.param_format);
  const auto grad_format = static_cast<Format>(entry.grad_format);
  const int64_t first = static_cast<int64_t>(chunk - entry.first_chunk) * kDeviceChunk;
  const int64_t rest = entry.numel - first;
  const int len = static_cast<int>(rest < kDeviceChunk ? rest : kDeviceChunk);
  constexpr auto kSize = static_cast<int64_t>(sizeof(value_t));
  const int64_t param_size = bytes_per_element(param_format);
  const int64_t grad_size = bytes_per_element(grad_format);
  constexpr int kWidth = kUpdateWidth<value_t>;
  const bool aligned =
      is_multiple(entry.p, kWidth * param_size) && is_multiple(entry.g, kWidth * grad_size) &&
      is_multiple(entry.m, kWidth * kSize) && is_multiple(entry.v, kWidth * kSize) &&
      is_multiple(entry.largest, kWidth * kSize);
  const int whole = aligned ? len - len % kWidth : 0;
  const UpdatePlace at = {moved(entry.p, first * param_size),  moved(entry.g, first * grad_size),
                          moved(entry.m, first * kSize),       moved(entry.v, first * kSize),
                          moved(entry.largest, first * kSize), static_cast<uint32_t>(first)};
  const Loop loop = loop_of(call.algorithm, work.flags, entry.m != nullptr);
  const bool telemetry = call.telemetry;
  ThreadSums<value_t> sums;
  if constexpr (sizeof(value_t) == 8) {
    update_in(loop, BothAre<double>{}, at, work, telemetry, whole, len, sums);
  } else {
    if (param_format != grad_format) {
      update_in(loop, AnyFormats{param_format, grad_format}, at, work, telemetry, whole, len, sums);
    } else if (param_format == Format::kBfloat16) {
      update_in(loop, BothAre<Bfloat16>{}, at, work, telemetry, whole, len, sums);
    } else if (param_format == Format::kFloat16) {
      update_in(loop, BothAre<Float16>{}, at, work, telemetry, whole, len, sums);
    } else {
      update_in(loop, BothAre<float>{}, at, work, telemetry, whole, len, sums);
    }
  }
  return sums;
}

template <typename value_t>
__device__ __forceinline__ UpdateSums widened_sums(const ThreadSums<value_t>& from) {
  UpdateSums sums = {{from.weights, from.updates}, {}};
  constexpr uint32_t kMask = (1u << kBadBits) - 1;
  for (int k = 0; k < 3; ++k) sums.numbers[2 + k] = from.bad >> k * kBadBits & kMask;
  for (int k = 0; k < UpdateSums::kWords; ++k) sums.words[k] = from.words[k];
  return sums;
}

// Adds the threads' sums, always in the same order, and has thread 0 write them: one after the
// other, because all at once would take registers from the loops. Before the next call writes the
// shared memory again there is the barrier of update_chunk.
__device__ __forceinline__ void store_total(UpdateSums sums, UpdateSums* slot) {
  ZCLIP_SHARED(UpdateSums, per_warp, kWarps);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (double& number : sums.numbers) number = warp_join<Add>(number);
#pragma unroll
  for (unsigned long long& word : sums.words) word = warp_join<Add>(word);
  if (lane == 0) per_warp[warp] = sums;
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll 1
  for (int k = 0; k < UpdateSums::kDoubles; ++k) {
    double total = 0.0;
    for (int w = 0; w < kWarps; ++w) total += per_warp[w].numbers[k];
    slot->numbers[k] = total;
  }
#pragma unroll 1
  for (int k = 0; k < UpdateSums::kWords; ++k) {
    unsigned long long total = 0;
    for (int w = 0; w < kWarps; ++w) total += per_warp[w].words[k];
    slot->words[k] = total;
  }
}

// The last tensor that does not begin after the chunk; tensors without elements have no chunk.
template <typename Table>
__device__ __forceinline__ const UpdateEntry& update_entry_of(const Table& table, uint32_t chunk) {
  int low = 0, high = table.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (table.entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return table.entries[low];
}

__device__ __forceinline__ uint32_t chunks_of(int64_t numel) {
  return static_cast<uint32_t>((numel + kDeviceChunk - 1) / kDeviceChunk);
}

// One tensor is finished: compares with the ledger, writes ledger, step and row. One thread.
__device__ __forceinline__ void finish_tensor(const UpdateEntry& entry, const UpdateSums& sums,
                                              const UpdateArguments& call) {
  const int64_t i = entry.row;
  if (entry.g == nullptr && entry.p != nullptr) {  // had no gradient
    for (int c = 0; call.telemetry && c < kNumTelemetry; ++c)
      call.rows[i * kNumTelemetry + c] = 0.0;
    return;
  }
  if (entry.step != nullptr) {
    if (entry.step_is_double) {
      *static_cast<double*>(entry.step) += 1.0;
    } else {
      *static_cast<float*>(entry.step) += 1.0f;
    }
  }
  int64_t* known = call.ledger + i * kNumLedger;
  const bool is_wide = static_cast<Format>(entry.param_format) == Format::kFloat64;
  const unsigned long long mask = is_wide ? ~0ull : 0xffffffffull;
  int foreign = 0;
  for (int k = 0; k < 3; ++k) {
    const bool differs = static_cast<unsigned long long>(known[k]) != (sums.words[k] & mask);
    if (call.telemetry && known[kIsKnown] != 0 && differs) foreign |= 1 << k;
    known[k] = call.telemetry ? static_cast<int64_t>(sums.words[3 + k] & mask) : 0;
  }
  known[kIsKnown] = call.telemetry ? 1 : 0;
  known[kUpdates] += 1;
  if (!call.telemetry) return;
  double* row = call.rows + i * kNumTelemetry;
  for (int c = 0; c < UpdateSums::kDoubles; ++c) row[c] = sums.numbers[c];
  row[kForeign] = foreign;
}

// The summary of all rows, in a fixed order. All threads of one block.
__device__ __forceinline__ void write_summary(const UpdateArguments& call, bool taken) {
  double weights = 0.0, updates = 0.0, bad_weights = 0.0, bad_states = 0.0;
  double first_bad = 0.0, first_foreign = 0.0;  // counted from the end, so that 0 is none
  const int64_t count = call.telemetry ? call.total : 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const double* row = call.rows + i * kNumTelemetry;
    const double from_end = static_cast<double>(call.total - i);
    const bool bad_state = row[kFirstBad] + row[kSecondBad] > 0.0;
    weights += row[kWeightSumSq];
    updates += row[kUpdateSumSq];
    bad_weights += row[kWeightBad];
    bad_states += bad_state ? 1.0 : 0.0;
    if (row[kWeightBad] > 0.0 || bad_state) first_bad = Largest::join(first_bad, from_end);
    if (row[kForeign] > 0.0) first_foreign = Largest::join(first_foreign, from_end);
  }
  weights = block_sum(weights);
  updates = block_sum(updates);
  bad_weights = block_sum(bad_weights);
  bad_states = block_sum(bad_states);
  first_bad = block_join<Largest>(first_bad);
  first_foreign = block_join<Largest>(first_foreign);
  if (threadIdx.x != 0) return;
  const int flags = (bad_weights > 0.0 ? kBadWeight : 0) | (bad_states > 0.0 ? kBadState : 0) |
                    (first_foreign > 0.0 ? kForeignWrite : 0);
  const auto total = static_cast<double>(call.total);
  call.summary[kTaken] = taken ? 1.0f : 0.0f;
  call.summary[kHealthFlags] = static_cast<float>(flags);
  call.summary[kFirstBadTensor] = static_cast<float>(first_bad > 0.0 ? total - first_bad : -1.0);
  call.summary[kFirstForeign] =
      static_cast<float>(first_foreign > 0.0 ? total - first_foreign : -1.0);
  call.summary[kWeightNorm] = static_cast<float>(sqrt(weights));
  call.summary[kUpdateNorm] = static_cast<float>(sqrt(updates));
}

__device__ __forceinline__ bool is_blocked(const UpdateArguments& call) {
  if (call.blocked == nullptr) return false;
  if (call.blocked[kBlocked] != 0.0f) return true;
  return call.skip_flags != 0 && (static_cast<int>(call.blocked[kFlags]) & call.skip_flags) != 0;
}

// grid: any number of blocks; each takes every gridDim.x-th chunk. Thread 0 writes slots[chunk] for
// each chunk of its block. The last block writes rows, ledger and steps; that of the last table
// writes the summary. No result depends on the number of blocks or on their order. A blocked step
// is left to block 0, which writes zeros to the rows.
//
// value_t is the format of the arithmetic, the same for all tensors of a table. float64 needs twice
// the registers, and has no hurry.
template <typename value_t, typename Table>
__global__ void __launch_bounds__(kThreads, sizeof(value_t) == 8 ? 1 : kBlocksPerMultiprocessor)
    optim_update_partials(const Table __grid_constant__ table, UpdateSums* slots,
                          const Ticket ticket, const UpdateArguments __grid_constant__ call) {
  if (is_blocked(call)) {
    if (blockIdx.x != 0) return;
    const int rows = call.telemetry ? table.count : 0;
    for (int t = threadIdx.x; t < rows; t += kThreads) {
      double* row = call.rows + int64_t{table.entries[t].row} * kNumTelemetry;
      for (int c = 0; c < kNumTelemetry; ++c) row[c] = 0.0;
    }
    __syncthreads();
    if (call.is_last_table) write_summary(call, false);
    return;
  }
  for (uint32_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
    const UpdateEntry& entry = update_entry_of(table, c);
    store_total(widened_sums(update_chunk<value_t>(table, entry, c, call)), slots + c);
  }
  if (!is_last_block(ticket)) return;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int t = warp; t < table.count; t += kWarps) {
    const UpdateEntry& entry = table.entries[t];
    const uint32_t end =
        entry.g == nullptr ? entry.first_chunk : entry.first_chunk + chunks_of(entry.numel);
    UpdateSums sums = {};
    for (uint32_t c = entry.first_chunk + lane; c < end; c += kWarpSize) {
      for (int k = 0; k < UpdateSums::kDoubles; ++k)
        sums.numbers[k] += __ldcg(slots[c].numbers + k);
      for (int k = 0; k < UpdateSums::kWords; ++k) sums.words[k] += __ldcg(slots[c].words + k);
    }
    for (double& number : sums.numbers) number = warp_join<Add>(number);
    for (unsigned long long& word : sums.words) word = warp_join<Add>(word);
    if (lane == 0) finish_tensor(entry, sums, call);
  }
  __syncthreads();  // every warp has written its rows
  if (call.is_last_table) write_summary(call, true);
}

}  // namespace zclip::cuda
