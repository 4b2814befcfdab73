// Barriers and warp collectives under their CUDA names. Stricter than the hardware: all must meet
// at the same line, and a lane named in a mask must come; what never meets is reported as a
// deadlock.

#pragma once

#include <type_traits>

#include "block.h"

// The place of the call, as trailing default arguments.
#define SIMT_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace simt {

// A barrier is passed when every thread that has not exited stands at it.
inline void pass_barrier_if_complete(Block& block) {
  if (block.arrived == 0 || block.arrived != block.live) return;
  block.last_arrived = block.arrived;
  block.last_votes = block.votes;
  block.arrived = block.votes = 0;
  ++block.barriers_passed;
  for (Thread& thread : block.threads) {
    if (thread.state == State::kAtBarrier) wake(thread);
  }
}

// Returns the block, whose last_arrived and last_votes stay put until all have left the barrier.
inline const Block& wait_at_barrier(const char* name, bool vote, const char* file, int line) {
  Unwatched unwatched;
  Thread& thread = *running.thread;
  Block& block = *thread.block;
  thread.at = {name, file, line, 0};
  if (block.arrived == 0) block.barrier = thread.at;
  if (!(block.barrier == thread.at)) {
    fail("threads of one block stand at different barriers: " + block.barrier.text() + " and " +
         thread.at.text());
  }
  Token* token = &block.barrier_tokens[block.barriers_passed % 2];
  release(token);
  ++block.arrived;
  block.votes += vote;
  sleep(thread, State::kAtBarrier);
  pass_barrier_if_complete(block);
  give_up_turn();
  acquire(token);
  return block;
}

// What one lane takes from a collective in which all lanes of `mask` have given their values.
using Answer = uint64_t (*)(const Thread* lanes, unsigned lane, uint32_t mask);

inline void meet_if_complete(Warp& warp, Thread* lanes, const Collective& at, Answer answer) {
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    if (!(at.mask >> lane & 1)) continue;
    if (lanes[lane].state != State::kAtWarpCollective || !(lanes[lane].at == at)) return;
  }
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    if (at.mask >> lane & 1) lanes[lane].taken = answer(lanes, lane, at.mask);
  }
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    if (!(at.mask >> lane & 1)) continue;
    wake(lanes[lane]);
    --warp.waiting;
  }
}

// The token of whoever already waits at this collective, or a new one.
inline Token* meeting_token(Warp& warp, const Thread* lanes, const Collective& at) {
  for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
    const bool is_member = at.mask >> lane & 1;
    if (is_member && lanes[lane].state == State::kAtWarpCollective && lanes[lane].at == at) {
      return lanes[lane].token;
    }
  }
  return &warp.tokens[warp.meetings++ % Warp::kTokens];
}

// Only __syncwarp orders memory; a shuffle that seems to is a race waiting for a better compiler.
enum class Ordering { kNone, kMemory };

inline uint64_t wait_for_warp(const Collective& at, uint64_t given, unsigned source_lane,
                              Answer answer, Ordering ordering = Ordering::kNone) {
  Unwatched unwatched;
  Thread& thread = *running.thread;
  Warp& warp = thread.block->warp_of(thread);
  Thread* lanes = &thread.block->threads[thread.warp() * kWarpThreads];
  if (!(at.mask >> thread.lane() & 1)) fail("caller is not in the mask of " + at.text());
  if (at.mask & ~warp.present) fail("mask names lanes that the block lacks: " + at.text());
  const bool orders = SIMT_TSAN && ordering == Ordering::kMemory;
  Token* token = orders ? meeting_token(warp, lanes, at) : nullptr;
  if (orders) release(token);
  thread.at = at;
  thread.given = given;
  thread.source_lane = source_lane;
  thread.token = token;
  sleep(thread, State::kAtWarpCollective);
  ++warp.waiting;
  if (warp.waiting >= static_cast<unsigned>(__builtin_popcount(at.mask))) {
    meet_if_complete(warp, lanes, at, answer);
  }
  give_up_turn();
  if (orders) acquire(token);
  return thread.taken;
}

template <typename T>
T shuffle(const Collective& at, T value, unsigned source_lane) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "CUDA shuffles 4- and 8-byte numbers");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  const uint64_t taken = wait_for_warp(
      at, bits, source_lane, [](const Thread* lanes, unsigned lane, uint32_t mask) -> uint64_t {
        const unsigned source = lanes[lane].source_lane;
        const bool is_defined = mask >> source & 1;
        return is_defined ? lanes[source].given : ~uint64_t{0};  // undefined on the device: NaN
      });
  memcpy(&value, &taken, sizeof value);
  return value;
}

inline unsigned current_lane() { return running.thread->lane(); }

inline uint32_t ballot(const Collective& at, bool vote) {
  return static_cast<uint32_t>(
      wait_for_warp(at, vote, 0, [](const Thread* lanes, unsigned, uint32_t mask) {
        uint64_t votes = 0;
        for (unsigned lane = 0; lane < kWarpThreads; ++lane) {
          if (mask >> lane & 1) votes |= lanes[lane].given << lane;
        }
        return votes;
      }));
}

}  // namespace simt

inline void __syncthreads(SIMT_SITE) { simt::wait_at_barrier("__syncthreads", false, file, line); }
inline int __syncthreads_or(int predicate, SIMT_SITE) {
  return simt::wait_at_barrier("__syncthreads_or", predicate != 0, file, line).last_votes > 0;
}
inline int __syncthreads_and(int predicate, SIMT_SITE) {
  const simt::Block& block = simt::wait_at_barrier("__syncthreads_and", predicate != 0, file, line);
  return block.last_votes == block.last_arrived;
}
inline int __syncthreads_count(int predicate, SIMT_SITE) {
  return static_cast<int>(
      simt::wait_at_barrier("__syncthreads_count", predicate != 0, file, line).last_votes);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_SITE) {
  simt::wait_for_warp(
      {"__syncwarp", file, line, mask}, 0, 0,
      [](const simt::Thread*, unsigned, uint32_t) -> uint64_t { return 0; },
      simt::Ordering::kMemory);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_SITE) {
  const unsigned segment = simt::current_lane() / width * width;
  return simt::shuffle({"__shfl_sync", file, line, mask}, value,
                       segment + (static_cast<unsigned>(source) & (width - 1)));
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  const unsigned lane = simt::current_lane();
  const bool stays_inside = lane % width + delta < static_cast<unsigned>(width);
  return simt::shuffle({"__shfl_down_sync", file, line, mask}, value,
                       stays_inside ? lane + delta : lane);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_SITE) {
  const unsigned lane = simt::current_lane();
  return simt::shuffle({"__shfl_up_sync", file, line, mask}, value,
                       lane % width >= delta ? lane - delta : lane);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, SIMT_SITE) {
  const unsigned lane = simt::current_lane();
  const unsigned source = lane ^ static_cast<unsigned>(lane_mask);
  const bool is_in_a_later_segment = source / width > lane / width;
  return simt::shuffle({"__shfl_xor_sync", file, line, mask}, value,
                       is_in_a_later_segment || source >= 32 ? lane : source);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_SITE) {
  return simt::ballot({"__ballot_sync", file, line, mask}, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate, SIMT_SITE) {
  return simt::ballot({"__any_sync", file, line, mask}, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_SITE) {
  return simt::ballot({"__all_sync", file, line, mask}, predicate != 0) == mask;
}
