// Holds the floating-point mode still. torch.set_flush_denormal changes it on the calling thread
// only, so without this the same sum would have other bits on two threads than on one.

#pragma once

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace zclip::cpu {

class FloatMode {
 public:
#if defined(__SSE__) || defined(_M_X64)
  FloatMode() : before_(_mm_getcsr()) { _mm_setcsr(kDefaultMode); }
  ~FloatMode() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned kDefaultMode = 0x1f80;  // round to nearest, keep subnormals, no traps
  unsigned before_;
#else
  FloatMode() {}
  ~FloatMode() {}
#endif

 public:
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;
};

}  // namespace zclip::cpu
