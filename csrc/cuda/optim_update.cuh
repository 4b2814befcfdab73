// Pass 2 of a fused step: reads gradients, parameters and state once, writes parameters and state,
// and in the block that comes last makes rows of telemetry out of the chunks' slots. One launch.

#pragma once

#include <cstring>

#include "../math/scale.h"
#include "block_join.cuh"
#include "launch_grid.cuh"
#include "optim_update.h"
#include "ticket.cuh"

namespace zclip::cuda {

constexpr int kUpdateWidth = 4;  // elements that a thread loads at once
constexpr int kMaxGroups = 8;    // of one launch

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
  static constexpr int kWords = 6;    // patterns loaded and stored
  double numbers[kDoubles];
  unsigned long long words[kWords];
};

// Four elements, which lie at a multiple of their size. Loads and stores of 8 or 16 bytes.
template <typename number_t>
struct Four {
  number_t numbers[kUpdateWidth];
};

template <typename number_t>
__device__ __forceinline__ Four<number_t> load_four(const number_t* from) {
  Four<number_t> four;
  if constexpr (sizeof(four) == sizeof(uint2)) {
    const uint2 bits = *reinterpret_cast<const uint2*>(from);
    memcpy(&four, &bits, sizeof bits);
  } else {
#pragma unroll
    for (size_t v = 0; v < sizeof(four) / sizeof(uint4); ++v) {
      const uint4 bits = reinterpret_cast<const uint4*>(from)[v];
      memcpy(reinterpret_cast<char*>(&four) + v * sizeof bits, &bits, sizeof bits);
    }
  }
  return four;
}

// One store of 16 bytes: out of an assignment nvcc makes two of 8. Nothing in a launch reads what
// it stored.
__device__ __forceinline__ void store_words(void* to, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(a), "r"(b), "r"(c), "r"(d));
#else
  *static_cast<uint4*>(to) = {a, b, c, d};
#endif
}

template <typename number_t>
__device__ __forceinline__ void store_four(number_t* to, const Four<number_t>& four) {
  const number_t(&x)[kUpdateWidth] = four.numbers;
  if constexpr (sizeof(number_t) == 2) {
    *reinterpret_cast<uint2*>(to) = {x[0].bits | static_cast<uint32_t>(x[1].bits) << 16,
                                     x[2].bits | static_cast<uint32_t>(x[3].bits) << 16};
  } else if constexpr (sizeof(number_t) == 4) {
    store_words(to, bits_of(x[0]), bits_of(x[1]), bits_of(x[2]), bits_of(x[3]));
  } else {
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      const uint64_t low = bits_of(x[2 * v]), high = bits_of(x[2 * v + 1]);
      store_words(to + 2 * v, static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                  static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
    }
  }
}

template <int kCount, typename number_t, typename value_t>
__device__ __forceinline__ void load_wide(const char* data, int64_t i,
                                          value_t (&to)[kUpdateWidth]) {
  const auto* from = reinterpret_cast<const number_t*>(data) + i;
  if constexpr (kCount == 1) {
    to[0] = static_cast<value_t>(widen(*from));
  } else {
    const Four<number_t> four = load_four(from);
#pragma unroll
    for (int k = 0; k < kUpdateWidth; ++k) to[k] = static_cast<value_t>(widen(four.numbers[k]));
  }
}

template <int kCount, typename value_t>
__device__ __forceinline__ void load_any(Format format, const char* data, int64_t i,
                                         value_t (&to)[kUpdateWidth]) {
  switch (format) {
    case Format::kFloat32:
      return load_wide<kCount, float>(data, i, to);
    case Format::kBfloat16:
      return load_wide<kCount, Bfloat16>(data, i, to);
    case Format::kFloat16:
      return load_wide<kCount, Float16>(data, i, to);
    default:
      return load_wide<kCount, double>(data, i, to);
  }
}

template <int kCount, typename number_t>
__device__ __forceinline__ void store_all(char* data, int64_t i, const Four<number_t>& four) {
  auto* to = reinterpret_cast<number_t*>(data) + i;
  if constexpr (kCount == 1) {
    *to = four.numbers[0];
  } else {
    store_four(to, four);
  }
}

template <int kCount, typename value_t>
__device__ __forceinline__ void store_state(char* data, int64_t i,
                                            const value_t (&from)[kUpdateWidth]) {
  Four<value_t> four;
#pragma unroll
  for (int k = 0; k < kUpdateWidth; ++k) four.numbers[k] = k < kCount ? from[k] : value_t{};
  store_all<kCount>(data, i, four);
}

template <typename number_t, typename value_t>
__device__ __forceinline__ unsigned long long word_of(value_t value) {
  number_t number;
  narrow(value, &number);
  return static_cast<unsigned long long>(pattern_of(number));
}

// Rounds to the parameter's format, stores, and leaves the rounded values behind. Returns the sum
// of the patterns stored; `loaded` gets that of those that were there.
template <int kCount, typename number_t>
__device__ __forceinline__ unsigned long long store_param(
    char* data, int64_t i, bool stochastic, uint32_t key,
    decltype(widen(number_t{})) (&values)[kUpdateWidth]) {
  Four<number_t> four = {};
  unsigned long long sum = 0;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    bool done = false;
    if constexpr (sizeof(number_t) == 2) {
      Bfloat16 rounded = {};
      if (stochastic) {
        narrow_stochastically(values[k], random_bits(key, static_cast<uint32_t>(i + k)), &rounded);
        four.numbers[k].bits = rounded.bits;
        done = true;
      }
    }
    if (!done) narrow(values[k], &four.numbers[k]);
    sum += static_cast<unsigned long long>(pattern_of(four.numbers[k]));
    values[k] = widen(four.numbers[k]);
  }
  store_all<kCount>(data, i, four);
  return sum;
}

// The work of one chunk that is the same for all its elements.
template <typename value_t>
struct ChunkWork {
  UpdateScalars<value_t> scalars;
  double coef;
  uint32_t key;
  int flags;
};

template <typename value_t>
__device__ __forceinline__ value_t update_one(Algorithm algorithm, int flags, bool has_first,
                                              value_t g, value_t p, value_t& m, value_t& v,
                                              value_t& largest, const UpdateScalars<value_t>& s) {
  if (algorithm == Algorithm::kAdam) {
    return (flags & kAmsgrad) ? adam_update<true>(g, p, m, v, largest, s)
                              : adam_update<false>(g, p, m, v, largest, s);
  }
  if (algorithm == Algorithm::kLion) return lion_update(g, p, m, s);
  if (!has_first) return sgd_update<Momentum::kNone>(g, p, m, s);
  return (flags & kNesterov) ? sgd_update<Momentum::kNesterov>(g, p, m, s)
                             : sgd_update<Momentum::kPlain>(g, p, m, s);
}

// kCount elements from number i of the tensor on; adds what the telemetry wants.
template <int kCount, typename value_t>
__device__ __forceinline__ void update_elements(const UpdateEntry& entry, Algorithm algorithm,
                                                const ChunkWork<value_t>& work, int64_t i,
                                                UpdateSums& sums) {
  const auto param_format = static_cast<Format>(entry.param_format);
  value_t g[kUpdateWidth], p[kUpdateWidth];
  value_t m[kUpdateWidth] = {}, v[kUpdateWidth] = {}, largest[kUpdateWidth] = {};
  load_any<kCount>(static_cast<Format>(entry.grad_format), entry.g, i, g);
  load_any<kCount>(param_format, entry.p, i, p);
  if (entry.m != nullptr) load_wide<kCount, value_t>(entry.m, i, m);
  if (entry.v != nullptr) load_wide<kCount, value_t>(entry.v, i, v);
  if (entry.largest != nullptr) load_wide<kCount, value_t>(entry.largest, i, largest);
  const bool is_tiny = fabs(work.coef) < kSmallestNormalFloat && work.coef != 0.0;
  const auto coef = static_cast<value_t>(work.coef);
  unsigned long long (&words)[UpdateSums::kWords] = sums.words;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    words[0] += param_format == Format::kBfloat16  ? word_of<Bfloat16>(static_cast<float>(p[k]))
                : param_format == Format::kFloat16 ? word_of<Float16>(static_cast<float>(p[k]))
                                                   : bits_of(p[k]);
    words[1] += bits_of(m[k]);
    words[2] += bits_of(v[k]);
    value_t scaled =
        is_tiny ? static_cast<value_t>(static_cast<double>(g[k]) * work.coef) : g[k] * coef;
    if ((work.flags & kDropNonFinite) && !is_finite(g[k])) scaled = value_t{};
    if (work.scalars.l2 != value_t{}) scaled = scaled + work.scalars.l2 * p[k];
    const value_t change = update_one(algorithm, work.flags, entry.m != nullptr, scaled, p[k], m[k],
                                      v[k], largest[k], work.scalars);
    p[k] = p[k] - change;
    const double wide = is_finite(change) ? static_cast<double>(change) : 0.0;
    sums.numbers[1] += wide * wide;
    words[4] += bits_of(m[k]);
    words[5] += bits_of(v[k]);
    sums.numbers[3] += is_finite(m[k]) ? 0.0 : 1.0;
    sums.numbers[4] += is_finite(v[k]) ? 0.0 : 1.0;
  }
  if constexpr (sizeof(value_t) == 8) {
    words[3] += store_param<kCount, double>(entry.p, i, false, 0, p);
  } else {
    const bool stochastic = (work.flags & kStochastic) != 0;
    switch (param_format) {
      case Format::kBfloat16:
        words[3] += store_param<kCount, Bfloat16>(entry.p, i, stochastic, work.key, p);
        break;
      case Format::kFloat16:
        words[3] += store_param<kCount, Float16>(entry.p, i, false, 0, p);
        break;
      default:
        words[3] += store_param<kCount, float>(entry.p, i, false, 0, p);
    }
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const double wide = is_finite(p[k]) ? static_cast<double>(p[k]) : 0.0;
    sums.numbers[0] += wide * wide;
    sums.numbers[2] += is_finite(p[k]) ? 0.0 : 1.0;
  }
  if (entry.m != nullptr) store_state<kCount>(entry.m, i, m);
  if (entry.v != nullptr) store_state<kCount>(entry.v, i, v);
  if (entry.largest != nullptr) store_state<kCount>(entry.largest, i, largest);
}

__device__ __forceinline__ bool is_four_aligned(const void* address, int64_t size) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(kUpdateWidth * size) == 0;
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

// All threads of the block; `sums` is each thread's own.
template <typename value_t, typename Table>
__device__ __forceinline__ void update_chunk(const Table& table, const UpdateEntry& entry,
                                             uint32_t chunk, const UpdateArguments& call,
                                             UpdateSums& sums) {
  ZCLIP_SHARED(ChunkWork<value_t>, shared_work, 1);
  if (threadIdx.x == 0) prepare(table, entry, call, shared_work);
  __syncthreads();
  const ChunkWork<value_t> work = shared_work[0];
  const int64_t first = static_cast<int64_t>(chunk - entry.first_chunk) * kDeviceChunk;
  const int64_t rest = entry.numel - first, len = rest < kDeviceChunk ? rest : kDeviceChunk;
  const auto size = static_cast<int64_t>(sizeof(value_t));
  const bool aligned =
      is_four_aligned(entry.p, bytes_per_element(static_cast<Format>(entry.param_format))) &&
      is_four_aligned(entry.g, bytes_per_element(static_cast<Format>(entry.grad_format))) &&
      is_four_aligned(entry.m, size) && is_four_aligned(entry.v, size) &&
      is_four_aligned(entry.largest, size);
  const int64_t whole = aligned ? len - len % kUpdateWidth : 0;
  for (int64_t i = int64_t{threadIdx.x} * kUpdateWidth; i < whole; i += kThreads * kUpdateWidth) {
    update_elements<kUpdateWidth>(entry, call.algorithm, work, first + i, sums);
  }
  for (int64_t i = whole + threadIdx.x; i < len; i += kThreads) {
    update_elements<1>(entry, call.algorithm, work, first + i, sums);
  }
}

// Adds the threads' sums, always in the same order. Thread 0 gets the result. Before the next call
// writes the shared memory again there is the barrier of update_chunk.
__device__ __forceinline__ UpdateSums block_total(UpdateSums sums) {
  ZCLIP_SHARED(UpdateSums, per_warp, kWarps);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (double& number : sums.numbers) number = warp_join<Add>(number);
#pragma unroll
  for (unsigned long long& word : sums.words) word = warp_join<Add>(word);
  if (lane == 0) per_warp[warp] = sums;
  __syncthreads();
  UpdateSums total = {};
  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w) {
      for (int k = 0; k < UpdateSums::kDoubles; ++k) total.numbers[k] += per_warp[w].numbers[k];
      for (int k = 0; k < UpdateSums::kWords; ++k) total.words[k] += per_warp[w].words[k];
    }
  }
  return total;
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
template <typename Table>
__global__ void __launch_bounds__(kThreads)
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
    UpdateSums sums = {};
    if (static_cast<Format>(entry.param_format) == Format::kFloat64) {
      update_chunk<double>(table, entry, c, call, sums);
    } else {
      update_chunk<float>(table, entry, c, call, sums);
    }
    const UpdateSums total = block_total(sums);
    if (threadIdx.x == 0) slots[c] = total;
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
