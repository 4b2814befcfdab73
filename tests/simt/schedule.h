// Who runs next. Forward and reverse order let one warp run as far ahead as the barriers allow;
// random order mixes warps, lanes and blocks by seed and starves some of them for a while.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace simt {

enum class Order { kForward, kReverse, kRandom };

struct Schedule {
  Order order = Order::kForward;
  uint64_t seed = 0;
  unsigned resident = 3;  // blocks that run at the same time
};

// splitmix64: any seed is good, including 0.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  unsigned below(unsigned bound) { return static_cast<unsigned>(next() % bound); }
  bool one_in(unsigned odds) { return below(odds) == 0; }

 private:
  uint64_t state_;
};

class Scheduler {
 public:
  Scheduler(const Schedule& schedule, uint64_t launch)
      : order_(schedule.order),
        random_(schedule.seed * 1000003 + launch),
        repeats_(kRepeatChoices[random_.below(3)]) {}

  std::vector<unsigned> block_order(unsigned blocks) {
    std::vector<unsigned> order(blocks);
    std::iota(order.begin(), order.end(), 0u);
    if (order_ == Order::kReverse) std::reverse(order.begin(), order.end());
    if (order_ == Order::kRandom) {
      for (unsigned i = blocks; i > 1; --i) std::swap(order[i - 1], order[random_.below(i)]);
    }
    return order;
  }

  // Chooses among the ready warps, given as (resident slot, warp) in ascending order.
  size_t choose(const std::vector<std::pair<unsigned, unsigned>>& ready) {
    if (order_ == Order::kForward) return 0;
    if (order_ == Order::kReverse) return ready.size() - 1;
    if (random_.below(kOutOf) < repeats_) {
      const auto last = std::lower_bound(ready.begin(), ready.end(), last_);
      if (last != ready.end() && *last == last_) return last - ready.begin();
    }
    if (random_.one_in(kStarvationTurns)) starve(ready[random_.below(ready.size())]);
    size_t choice = random_.below(ready.size());
    for (size_t tried = 1; tried < ready.size() && is_starved(ready[choice]); ++tried) {
      choice = (choice + 1) % ready.size();
    }
    last_ = ready[choice];
    return choice;
  }

  // The lanes of a ready mask in the order in which they get their turn; some may get none.
  template <typename Visit>
  void visit_lanes(uint32_t ready, Visit visit) {
    const bool is_random = order_ == Order::kRandom;
    const unsigned first = is_random ? random_.below(32) : order_ == Order::kReverse ? 31 : 0;
    const unsigned step = is_random                   ? 2 * random_.below(16) + 1
                          : order_ == Order::kReverse ? 31
                                                      : 1;
    for (unsigned i = 0, lane = first; i < 32; ++i, lane = (lane + step) % 32) {
      if (!(ready >> lane & 1)) continue;
      if (is_random && random_.one_in(kLaneStarvationOdds)) continue;
      visit(lane);
    }
  }

  // Whether a thread loses its turn at an atomic or a fence.
  bool preempts() { return order_ == Order::kRandom && random_.one_in(kPreemptionOdds); }

 private:
  // How often, out of 16 turns, the last warp goes on: fine interleaving, or long runs ahead.
  static constexpr unsigned kOutOf = 16;
  static constexpr unsigned kRepeatChoices[3] = {0, 8, 15};
  static constexpr unsigned kStarvationTurns = 64;  // about as many as a block needs to finish
  static constexpr unsigned kLaneStarvationOdds = 16;
  static constexpr unsigned kPreemptionOdds = 4;

  void starve(std::pair<unsigned, unsigned> victim) {
    starved_ = victim;
    starves_whole_block_ = random_.one_in(2);
  }
  bool is_starved(std::pair<unsigned, unsigned> candidate) const {
    return starves_whole_block_ ? candidate.first == starved_.first : candidate == starved_;
  }

  Order order_;
  Random random_;
  unsigned repeats_;
  std::pair<unsigned, unsigned> last_{~0u, ~0u};
  std::pair<unsigned, unsigned> starved_{~0u, ~0u};
  bool starves_whole_block_ = false;
};

}  // namespace simt
