// The host side of the launch of an optimizer update: cut the list into tables, hand over by value.

#include <atomic>

#include "../math/fingerprint.h"
#include "optim_update.cuh"
#include "tensor_table.cuh"

namespace zclip::cuda {
namespace {

int64_t update_chunks(const UpdateTensor& tensor) {
  return tensor.g == nullptr ? 0 : (tensor.numel + kDeviceChunk - 1) / kDeviceChunk;
}

int64_t update_slots(const UpdateTensor* tensors, int64_t count) {
  int64_t slots = 0;
  for (int64_t i = 0; i < count; ++i) slots += update_chunks(tensors[i]);
  return slots;
}

template <typename Table>
int launch_tables(const UpdateTensor* tensors, int64_t count, const UpdateCall& call,
                  UpdateSums* slots, const Ticket& ticket, Queue queue) {
  Table table;
  UpdateArguments arguments = {call.algorithm,  call.telemetry, false,        count,
                               call.ledger,     call.coefs,     call.blocked, call.skip_flags,
                               call.grad_scale, call.rates,     call.seed,    call.rows,
                               call.summary};
  int64_t next = 0;
  do {
    table.count = 0;
    table.chunks = 0;
    int groups = 0;
    const bool is_wide = next < count && tensors[next].param_format == Format::kFloat64;
    for (; next < count && table.count < Table::kCapacity; ++next) {
      const UpdateTensor& tensor = tensors[next];
      if ((tensor.param_format == Format::kFloat64) != is_wide) break;
      if (groups == 0 || table.groups[groups - 1] != tensor.group) {
        if (groups == kMaxGroups) break;
        table.groups[groups] = tensor.group;
        memcpy(table.settings[groups], call.settings + int64_t{tensor.group} * kNumOptimSettings,
               sizeof table.settings[groups]);
        ++groups;
      }
      table.entries[table.count++] = {static_cast<char*>(tensor.p),
                                      static_cast<const char*>(tensor.g),
                                      static_cast<char*>(tensor.m),
                                      static_cast<char*>(tensor.v),
                                      static_cast<char*>(tensor.largest),
                                      tensor.step,
                                      tensor.numel,
                                      table.chunks,
                                      static_cast<uint32_t>(next),
                                      static_cast<uint8_t>(tensor.param_format),
                                      static_cast<uint8_t>(tensor.grad_format),
                                      static_cast<uint8_t>(tensor.step_is_double),
                                      static_cast<uint8_t>(groups - 1)};
      table.chunks += static_cast<uint32_t>(update_chunks(tensor));
    }
    arguments.is_last_table = next == count;
    const auto error =
        launch(is_wide ? optim_update_partials<double, Table> : optim_update_partials<float, Table>,
               blocks_for(table.chunks, queue.device), kThreads, static_cast<Stream>(queue.stream),
               table, slots, ticket, arguments);
    if (error != LaunchError{}) return static_cast<int>(error);
  } while (next < count);  // the launches are in order, so they share the slots
  return 0;
}

}  // namespace

int64_t update_scratch_bytes(const UpdateTensor* tensors, int64_t count) {
  return (update_slots(tensors, count) + 1) * int64_t{sizeof(UpdateSums)};
}

int launch_optim_update(const UpdateTensor* tensors, int64_t count, const UpdateCall& call,
                        void* scratch, Queue queue) {
  // Any number that memory does not hold by accident and no other call has.
  static std::atomic<uint64_t> calls{0};
  auto* slots = static_cast<UpdateSums*>(scratch);
  const Ticket ticket = {
      reinterpret_cast<unsigned long long*>(slots + update_slots(tensors, count)),
      mix(calls.fetch_add(1), kGolden) >> kCountBits};
#if ZCLIP_LARGE_ARGUMENTS
  if (count > SmallUpdateTable::kCapacity && takes_large_arguments()) {
    return launch_tables<LargeUpdateTable>(tensors, count, call, slots, ticket, queue);
  }
#endif
  return launch_tables<SmallUpdateTable>(tensors, count, call, slots, ticket, queue);
}

}  // namespace zclip::cuda
