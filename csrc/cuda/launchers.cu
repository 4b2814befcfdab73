// The host side of every launch: cut the list into tables, choose the grid, hand over by value.

#include "launchers.h"

#include <atomic>

#include "agc.cuh"
#include "fingerprint.cuh"
#include "power_stats.cuh"
#include "rewrite.cuh"
#include "watch_loss.cuh"

namespace zclip::cuda {
namespace {

Stream stream_of(Queue queue) { return static_cast<Stream>(queue.stream); }

// Behind the slots, which are 16 bytes each.
Ticket ticket_in(void* scratch, int64_t slots) {
  // Any number that memory does not hold by accident and no other call has.
  static std::atomic<uint64_t> calls{0};
  const uint64_t nonce = mix(calls.fetch_add(1), kGolden) >> kCountBits;
  return {reinterpret_cast<unsigned long long*>(static_cast<ChunkSlot*>(scratch) + slots), nonce};
}

int64_t slots_of(const DeviceTensor* tensors, int64_t count) {
  int64_t slots = 0;
  for (int64_t i = 0; i < count; ++i) slots += num_chunks(tensors[i]);
  return slots;
}

int launch_row_stats(const DeviceTensor* tensors, int64_t count, void* scratch, Queue queue) {
  auto* slots = static_cast<ChunkSlot*>(scratch);
  return for_each_table(tensors, count, [&](const auto& table, int64_t chunks_before, bool) {
    using Table = std::decay_t<decltype(table)>;
    const int64_t groups = (int64_t{table.chunks} + kWarps - 1) / kWarps;
    return launch(row_stats_partials<Table>, blocks_for(groups, queue.device), kThreads,
                  stream_of(queue), table, slots + chunks_before);
  });
}

template <typename Change>
int launch_rewrite(const DeviceTensor* tensors, int64_t count, const Change& change, Queue queue) {
  return for_each_table_backwards(
      tensors, count, [&](const auto& table, uint32_t first_row, uint32_t end_row) {
        using Table = std::decay_t<decltype(table)>;
        return launch(rewrite<Table, Change>, blocks_for(table.chunks, queue.device), kThreads,
                      stream_of(queue), table, change, first_row, end_row);
      });
}

}  // namespace

int64_t scratch_bytes(const DeviceTensor* tensors, int64_t count) {
  return slots_of(tensors, count) * int64_t{sizeof(ChunkSlot)} + int64_t{sizeof(ChunkSlot)};
}

int launch_grad_stats(const DeviceTensor* tensors, int64_t count, void* scratch, GradStats* rows,
                      const Rule* rule, const Judgement& out, Queue queue) {
  Ending ending = {rule != nullptr, count, {}, out};
  if (rule != nullptr) ending.rule = *rule;
  auto* slots = static_cast<ChunkSlot*>(scratch);
  const Ticket ticket = ticket_in(scratch, slots_of(tensors, count));
  return for_each_table(
      tensors, count, [&](const auto& table, int64_t chunks_before, bool is_last) {
        using Table = std::decay_t<decltype(table)>;
        Ending this_ending = ending;
        this_ending.applies_rule &= is_last;
        return launch(grad_stats_partials<Table>, blocks_for(table.chunks, queue.device), kThreads,
                      stream_of(queue), table, slots + chunks_before, ticket, rows, this_ending);
      });
}

int launch_power_stats(const DeviceTensor* tensors, int64_t count, void* scratch, GradStats* rows,
                       double p, Queue queue) {
  auto* slots = static_cast<ChunkSlot*>(scratch);
  const Ticket ticket = ticket_in(scratch, slots_of(tensors, count));
  return for_each_table(tensors, count, [&](const auto& table, int64_t chunks_before, bool) {
    using Table = std::decay_t<decltype(table)>;
    return launch(power_stats_partials<Table>, blocks_for(table.chunks, queue.device), kThreads,
                  stream_of(queue), table, slots + chunks_before, ticket, rows, p);
  });
}

int launch_fingerprint(const DeviceTensor* tensors, int64_t count, void* scratch, int64_t* hashes,
                       Queue queue) {
  auto* slots = static_cast<Hash*>(scratch);
  const Ticket ticket = ticket_in(scratch, slots_of(tensors, count));
  return for_each_table(tensors, count, [&](const auto& table, int64_t chunks_before, bool) {
    using Table = std::decay_t<decltype(table)>;
    return launch(fingerprint_partials<Table>, blocks_for(table.chunks, queue.device), kThreads,
                  stream_of(queue), table, slots + chunks_before, ticket,
                  reinterpret_cast<Hash*>(hashes));
  });
}

int launch_rule(const Rule& rule, const GradStats* rows, int64_t count, const Judgement& out,
                Queue queue) {
  return launch(apply_rule_kernel, 1, kThreads, stream_of(queue), rule, rows, count, out);
}

int launch_watch_loss(const DeviceNumber& loss, const LossSettings& settings, double* state,
                      float* verdict, Queue queue) {
  return launch(watch_loss, 1, 1, stream_of(queue), loss, settings, state, verdict);
}

int launch_scale(const DeviceTensor* tensors, int64_t count, const double* coefs,
                 const GradStats* zeroed, Queue queue) {
  return launch_rewrite(tensors, count, Scale{coefs, zeroed}, queue);
}

int launch_zero_nonfinite(const DeviceTensor* tensors, int64_t count, const GradStats* rows,
                          Queue queue) {
  return launch_rewrite(tensors, count, ZeroNonFinite{rows}, queue);
}

int launch_clamp(const DeviceTensor* tensors, int64_t count, double limit, Queue queue) {
  return launch_rewrite(tensors, count, Clamp{limit}, queue);
}

int launch_agc(const DeviceTensor* grads, const DeviceTensor* weights, int64_t count,
               void* grad_scratch, void* weight_scratch, const AgcCall& call, const Judgement& out,
               Queue queue) {
  if (int error = launch_row_stats(grads, count, grad_scratch, queue)) return error;
  if (int error = launch_row_stats(weights, count, weight_scratch, queue)) return error;
  const AgcSettings settings = {call.clip, call.eps, call.on_nonfinite};
  const AgcResults results = {call.stats, call.per_tensor, call.per_tensor + count, call.row_coefs};
  AgcTable table;
  uint32_t row = 0, slot = 0;
  for (int64_t first = 0; first < count; first += kAgcCapacity) {
    table.count = static_cast<int32_t>(count - first < kAgcCapacity ? count - first : kAgcCapacity);
    table.first_tensor = static_cast<int32_t>(first);
    for (int t = 0; t < table.count; ++t) {
      const DeviceTensor& tensor = grads[first + t];
      const auto rows = static_cast<uint32_t>(tensor.rows);
      const auto slots = static_cast<uint32_t>(num_chunks(tensor));
      table.tensors[t] = {row, rows, slot, rows > 0 ? slots / rows : 0};
      row += rows;
      slot += slots;
    }
    if (int error = launch(agc_rows, blocks_for(table.count, queue.device), kThreads,
                           stream_of(queue), table, static_cast<const ChunkSlot*>(grad_scratch),
                           static_cast<const ChunkSlot*>(weight_scratch), settings, results)) {
      return error;
    }
  }
  if (int error = launch(agc_finish, 1, kThreads, stream_of(queue), results, count,
                         static_cast<int64_t>(row), settings, call.counters, out)) {
    return error;
  }
  return launch_rewrite(grads, count, Scale{call.row_coefs, nullptr}, queue);
}

const char* error_text(int error) {
#if defined(ZCLIP_SIMT)
  return error == 0 ? "no error" : "an error that the emulator does not know";
#else
  return cudaGetErrorString(static_cast<cudaError_t>(error));
#endif
}

}  // namespace zclip::cuda

#if !defined(ZCLIP_SIMT)
// For zclip/backends/native.py, by ctypes: 0 if this library holds no code, nor PTX to compile it
// from, for the current device.
extern "C" __attribute__((visibility("default"))) int zclip_has_image() {
  cudaFuncAttributes unused;
  const auto* kernel =
      reinterpret_cast<const void*>(zclip::cuda::grad_stats_partials<zclip::cuda::SmallTable>);
  const cudaError_t error = cudaFuncGetAttributes(&unused, kernel);
  cudaGetLastError();  // it is reported here, not by the next launch
  return error == cudaErrorNoKernelImageForDevice ? 0 : 1;
}
#endif
