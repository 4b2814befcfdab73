// Threads, warps and blocks, and how a thread gives up its turn. What they wait for is in
// collectives.h; who gets the next turn, in schedule.h and launch.h.

#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "fences.h"
#include "fiber.h"
#include "memory.h"
#include "schedule.h"
#include "vector_types.h"

// CUDA's own names for where a thread stands; set at every switch.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;

namespace simt {

constexpr unsigned kWarpThreads = 32;

enum class State : uint8_t { kReady, kAtBarrier, kAtWarpCollective, kExited };

// Where a thread waits. Threads meet only if all of it is equal.
struct Collective {
  const char* name = "";
  const char* file = "";
  int line = 0;
  uint32_t mask = 0;  // lanes that take part; 0 for a barrier of the whole block

  bool operator==(const Collective& other) const {
    return line == other.line && mask == other.mask && is_same(name, other.name) &&
           is_same(file, other.file);
  }
  static bool is_same(const char* a, const char* b) { return a == b || strcmp(a, b) == 0; }
  std::string text() const {
    const char* slash = strrchr(file, '/');
    char lanes[32] = "";
    if (mask) snprintf(lanes, sizeof lanes, " (mask 0x%08x)", mask);
    return std::string(name) + lanes + " at " + (slash ? slash + 1 : file) + ":" +
           std::to_string(line);
  }
};

struct Block;

struct Thread {
  Fiber fiber;
  FenceHistory fences;
  Block* block = nullptr;
  unsigned rank = 0;  // in its block
  uint3 index{};
  State state = State::kReady;
  Collective at;
  uint64_t given = 0, taken = 0;  // what it brings to a warp collective and takes away
  unsigned source_lane = 0;       // whose value a shuffle asks for
  Token* token = nullptr;         // shared by those who meet

  unsigned lane() const { return rank % kWarpThreads; }
  unsigned warp() const { return rank / kWarpThreads; }
};

struct Warp {
  // A lane may sleep through other lanes' meetings, so tokens are not reused at once.
  static constexpr unsigned kTokens = 64;

  uint32_t present = 0, ready = 0;  // lanes
  unsigned waiting = 0;             // lanes at a collective of this warp
  unsigned meetings = 0;
  Token tokens[kTokens];
};

struct Block {
  Block(uint3 block_index, dim3 shape, BlockMemory* block_memory)
      : index(block_index),
        memory(block_memory),
        shared(block_memory->arena()),
        threads(memory->threads()),
        warps((memory->threads() + kWarpThreads - 1) / kWarpThreads),
        live(memory->threads()) {
    for (unsigned t = 0; t < live; ++t) {
      threads[t].block = this;
      threads[t].rank = t;
      threads[t].index = {t % shape.x, t / shape.x % shape.y, t / (shape.x * shape.y)};
      warps[t / kWarpThreads].present |= 1u << t % kWarpThreads;
    }
    for (Warp& warp : warps) warp.ready = warp.present;
  }

  Warp& warp_of(const Thread& thread) { return warps[thread.warp()]; }

  uint3 index;
  BlockMemory* memory;
  SharedMemory shared;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  unsigned live;

  unsigned arrived = 0, votes = 0;            // at the barrier now filling
  unsigned last_arrived = 0, last_votes = 0;  // at the one passed last
  Collective barrier;                         // of the first to arrive
  Token barrier_tokens[2];                    // by turns: a sleeper must not see the next barrier
  unsigned barriers_passed = 0;
};

// One launch at a time: the emulator runs on one OS thread and is not reentrant.
struct Running {
  Thread* thread = nullptr;
  Fiber host;
  Actor stranger;  // knows only what preceded the launch
  Token finished;  // released by every thread that exits
  Scheduler* scheduler = nullptr;
  const std::function<void()>* body = nullptr;
  std::string error;
};
inline Running running;

inline void give_up_turn() { switch_fiber(running.thread->fiber, running.host); }

inline void wake(Thread& thread) {
  thread.state = State::kReady;
  thread.block->warp_of(thread).ready |= 1u << thread.lane();
}

inline void sleep(Thread& thread, State why) {
  thread.state = why;
  thread.block->warp_of(thread).ready &= ~(1u << thread.lane());
}

inline std::string text(uint3 index) {
  if (index.y == 0 && index.z == 0) return std::to_string(index.x);
  return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
         std::to_string(index.z) + ")";
}

// Ends the launch with an error. The thread never runs again.
[[noreturn]] inline void fail(const std::string& what) {
  const Thread& thread = *running.thread;
  running.error =
      what + "\n  block " + text(thread.block->index) + ", thread " + std::to_string(thread.rank);
  give_up_turn();
  __builtin_trap();
}

}  // namespace simt
