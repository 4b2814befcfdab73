// What __threadfence promises, told to TSan, which knows no fences of its own: writes before a
// fence before an atomic are visible after a fence after an atomic that saw it, and nothing else
// is.

#pragma once

#include "sanitizers.h"

namespace simt {

// One per CUDA thread. TSan can only release all that an actor has done so far, but an atomic must
// pass on no more than what the last fence covered, and must not learn anything until the next
// fence. So two couriers, actors that run no code, carry just that between tokens.
class FenceHistory {
 public:
#if SIMT_TSAN
  void fence() {
    acquire(&observed_);
    release(&published_);
    has_fenced_ = true;
  }

  // `self` is the running thread; `stranger` an actor that knows only what preceded the launch.
  void atomic(void* address, Actor& self, Actor& stranger) {
    carry(reader_, address, &observed_, self, stranger);
    if (has_fenced_) carry(writer_, &published_, address, self, stranger);
  }

  void destroy() {
    reader_.destroy();
    writer_.destroy();
  }

 private:
  static void carry(Actor& courier, void* from, void* to, Actor& self, Actor& stranger) {
    if (!courier.exists()) {
      stranger.enter();  // or the courier would be born knowing all that this thread knows
      courier.create();
    }
    courier.enter();
    __tsan_acquire(from);
    __tsan_release(to);
    self.enter();
  }

  Token observed_, published_;
  Actor reader_, writer_;
  bool has_fenced_ = false;
#else
  void fence() {}
  void atomic(void*, Actor&, Actor&) {}
  void destroy() {}
#endif
};

}  // namespace simt
