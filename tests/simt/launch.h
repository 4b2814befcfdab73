// Runs a grid: keeps a few blocks resident, gives warps their turns, and reports what went wrong.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collectives.h"

namespace simt {

constexpr unsigned kMaxBlockThreads = 1024;
constexpr size_t kMaxArgumentBytes = 32764;  // CUDA 12.1 and later, sm_70 and later

inline Schedule schedule;  // of the launches to come; set_schedule starts the seed afresh

struct Counters {
  uint64_t launches = 0, blocks = 0, switches = 0;
};
inline Counters counters;  // since set_schedule

inline void set_schedule(const Schedule& next) {
  if (next.resident == 0) throw std::invalid_argument("simt: at least one block must be resident");
  schedule = next;
  counters = {};
}

// Where every thread of the block stands, equal places together.
inline std::string whereabouts(const Block& block) {
  std::string lines;
  const auto place = [](const Thread& thread) -> std::string {
    if (thread.state == State::kExited) return "exited";
    if (thread.state == State::kReady) return "can run";
    return "at " + thread.at.text();
  };
  for (size_t first = 0, last; first < block.threads.size(); first = last + 1) {
    const std::string here = place(block.threads[first]);
    last = first;
    while (last + 1 < block.threads.size() && place(block.threads[last + 1]) == here) ++last;
    lines += "\n  block " + text(block.index) + ", thread " + std::to_string(first);
    if (last > first) lines += " to " + std::to_string(last);
    lines += ": " + here;
  }
  return lines;
}

SIMT_UNSANITIZED inline void thread_entry() {
  arrive_on_new_stack(running.host);
  (*running.body)();
  release(&running.finished);
  {
    Unwatched unwatched;
    Thread& thread = *running.thread;
    sleep(thread, State::kExited);
    --thread.block->live;
    pass_barrier_if_complete(*thread.block);
  }
  switch_fiber(running.thread->fiber, running.host, /*from_is_finished=*/true);
  __builtin_trap();
}

class Grid {
 public:
  Grid(dim3 grid, dim3 block, const std::function<void()>& body)
      : grid_(grid),
        block_(block),
        scheduler_(schedule, counters.launches++),
        order_(scheduler_.block_order(grid.x * grid.y * grid.z)) {
    gridDim = grid;
    blockDim = block;
    running.body = &body;
    running.scheduler = &scheduler_;
    running.error.clear();
    running.host.actor.adopt_present();
    running.stranger.create();
  }
  ~Grid() {
    Unwatched unwatched;  // after an error the blocks still hold what their threads allocated
    resident_.clear();
    running.stranger.destroy();
  }
  Grid(const Grid&) = delete;

  void run() {
    Unwatched unwatched;
    while (running.error.empty()) {
      while (resident_.size() < schedule.resident && started_ < order_.size()) start_block();
      if (resident_.empty()) break;
      list_ready_warps();
      if (ready_.empty()) {
        running.error = "deadlock, no thread can run:";
        for (const auto& block : resident_) running.error += whereabouts(*block);
        break;
      }
      const auto [slot, warp] = ready_[scheduler_.choose(ready_)];
      Block& block = *resident_[slot];
      scheduler_.visit_lanes(block.warps[warp].ready, [&](unsigned lane) {
        if (running.error.empty()) resume(block.threads[warp * kWarpThreads + lane]);
      });
      if (block.live == 0) retire(slot);
    }
    release_stuck_threads();
    acquire(&running.finished);
  }

 private:
  // After an error the caller may free what the unfinished threads used; that is no second error.
  void release_stuck_threads() {
    for (const auto& block : resident_) {
      for (Thread& thread : block->threads) {
        thread.fiber.actor.enter();
        release(&running.finished);
        running.host.actor.enter();
      }
    }
  }

  void start_block() {
    const unsigned id = order_[started_++];
    const unsigned threads = block_.x * block_.y * block_.z;
    if (spare_memory.empty() || spare_memory.back()->threads() != threads) {
      spare_memory.clear();
      spare_memory.push_back(std::make_unique<BlockMemory>(threads));
    }
    memory_.push_back(std::move(spare_memory.back()));
    spare_memory.pop_back();
    const uint3 index = {id % grid_.x, id / grid_.x % grid_.y, id / (grid_.x * grid_.y)};
    resident_.push_back(std::make_unique<Block>(index, block_, memory_.back().get()));
    for (Thread& thread : resident_.back()->threads) {
      prepare_fiber(thread.fiber, memory_.back()->stack(thread.rank), kStackBytes, &thread_entry);
      thread.fiber.actor.create();
    }
    ++counters.blocks;
  }

  void list_ready_warps() {
    ready_.clear();
    for (unsigned slot = 0; slot < resident_.size(); ++slot) {
      for (unsigned warp = 0; warp < resident_[slot]->warps.size(); ++warp) {
        if (resident_[slot]->warps[warp].ready) ready_.emplace_back(slot, warp);
      }
    }
  }

  void resume(Thread& thread) {
    running.thread = &thread;
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    ++counters.switches;
    switch_fiber(running.host, thread.fiber);
  }

  void retire(unsigned slot) {
    Block& block = *resident_[slot];
    const std::string overrun = block.shared.overrun();
    if (!overrun.empty()) running.error = overrun + "\n  block " + text(block.index);
    for (Thread& thread : block.threads) {
      thread.fiber.actor.destroy();
      thread.fences.destroy();
    }
    resident_.erase(resident_.begin() + slot);
    // TSan remembers who touched an address, so under it no memory is used by two blocks.
    if (!SIMT_TSAN) spare_memory.push_back(std::move(memory_[slot]));
    memory_.erase(memory_.begin() + slot);
  }

  inline static std::vector<std::unique_ptr<BlockMemory>> spare_memory;  // mapping costs more

  dim3 grid_, block_;
  Scheduler scheduler_;
  std::vector<unsigned> order_;  // of the blocks
  size_t started_ = 0;
  std::vector<std::unique_ptr<Block>> resident_;
  std::vector<std::unique_ptr<BlockMemory>> memory_;  // of the resident blocks, same order
  std::vector<std::pair<unsigned, unsigned>> ready_;  // (resident slot, warp), ascending
};

// Stands in for kernel<<<grid, block>>>(args...), and returns when the grid has run. Arguments are
// converted and copied once, as a launch does. Throws std::runtime_error on a deadlock, a misused
// collective or a write outside a shared array.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, const Args&... args) {
  static_assert((sizeof(std::decay_t<Params>) + ... + 0) <= kMaxArgumentBytes,
                "kernel arguments exceed 32,764 bytes");
  const unsigned threads = block.x * block.y * block.z;
  if (threads == 0 || threads > kMaxBlockThreads || grid.x * grid.y * grid.z == 0) {
    throw std::invalid_argument("simt: a grid has at least one block of 1 to 1024 threads");
  }
  const std::tuple<std::decay_t<Params>...> arguments(args...);
  const std::function<void()> body = [&] { std::apply(kernel, arguments); };
  Grid(grid, block, body).run();
  if (!running.error.empty()) throw std::runtime_error("simt: " + running.error);
}

}  // namespace simt
