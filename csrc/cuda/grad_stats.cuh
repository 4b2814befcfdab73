// Pass 1: reads every gradient once, and in the block that comes last makes rows of stats out of
// the chunks' slots and applies a clip rule to them. One launch.

#pragma once

#include "apply_rule.cuh"
#include "chunk_stats.cuh"
#include "finish.cuh"
#include "launch_grid.cuh"
#include "tensor_table.cuh"
#include "ticket.cuh"

namespace zclip::cuda {

// What the last block does besides filling the rows of this launch's tensors.
struct Ending {
  bool applies_rule;   // of the last launch, where a rule is wanted
  int64_t total_rows;  // of all launches
  Rule rule;
  Judgement out;
};

// The slots were written by other blocks of this grid, hence around the first-level cache.
__device__ __forceinline__ ChunkSlot load_slot(const ChunkSlot* slot) {
  const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(slot));
  ChunkSlot loaded;
  memcpy(&loaded, &bits, sizeof loaded);
  return loaded;
}

// Makes a row of stats out of a tensor's slots: member `first` of `Crew` takes every kSize-th slot
// in order; they join in a fixed order, in float64; the leader writes the row.
template <typename Join>
struct FinishRow {
  const ChunkSlot* slots;
  GradStats* rows;

  template <typename Crew>
  __device__ __forceinline__ void operator()(const TableEntry& entry, uint32_t end) const {
    GradStats sum = {};
    for (uint32_t c = entry.first_chunk + Crew::member(); c < end; c += Crew::kSize) {
      const ChunkSlot slot = load_slot(slots + c);
      sum.sumsq = Join::join(sum.sumsq, slot.sumsq);
      sum.nan += slot.nan;
      sum.inf += slot.inf;
    }
    sum = {Crew::template join<Join>(sum.sumsq), Crew::template join<Add>(sum.nan),
           Crew::template join<Add>(sum.inf)};
    if (Crew::member() == 0) rows[entry.row_and_format >> kFormatBits] = sum;
  }
};

// grid: any number of blocks; each takes every gridDim.x-th chunk. Thread 0 writes slots[chunk] for
// each chunk of its block. The last block writes rows, coefs, verdict, norm and state. No result
// depends on the number of blocks or on their order.
template <typename Table>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    grad_stats_partials(const Table __grid_constant__ table, ChunkSlot* slots, const Ticket ticket,
                        GradStats* rows, const Ending __grid_constant__ ending) {
  // This chunk, the next, and the one behind it, which thread 0 looks up while loads are under way.
  // The barriers of streamed_stats stand between writing a place and reading it, and between
  // reading it and writing another one there.
  ZCLIP_SHARED(ChunkPlace, places, 3);
  ChunkWalk<Table> walk(table);
  if (threadIdx.x == 0) {
    places[0] = walk.place_of(blockIdx.x);
    places[1] = walk.place_of(blockIdx.x + gridDim.x);
  }
  __syncthreads();
  Round round = load_round(run_of(read_place(places[0])), static_cast<int>(threadIdx.x));
  int at = 0;
  for (uint32_t c = blockIdx.x; c < table.chunks; c += gridDim.x) {
    const ChunkPlace place = read_place(places[at]);
    const int next = at == 2 ? 0 : at + 1, after = next == 2 ? 0 : next + 1;
    const Run next_run = run_of(read_place(places[next]));
    if (threadIdx.x == 0) places[after] = walk.place_of(c + 2 * gridDim.x);
    const ChunkSlot slot = visit_chunk(
        place, [&](auto* data) { return streamed_stats(data, place.len, round, next_run); });
    if (threadIdx.x == 0) slots[c] = slot;
    at = next;
  }
  if (!is_last_block(ticket)) return;
  for_each_tensor(table, FinishRow<Add>{slots, rows});
  if (!ending.applies_rule) return;
  __syncthreads();  // every warp has written its rows
  apply_rule(ending.rule, rows, ending.total_rows, ending.out);
}

}  // namespace zclip::cuda
