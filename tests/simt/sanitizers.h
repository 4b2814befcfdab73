// What AddressSanitizer and ThreadSanitizer must be told about fibers and barriers. In a plain
// build every function here is empty. Knows nothing of CUDA.

#pragma once

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SIMT_ASAN 1
#else
#define SIMT_ASAN 0
#endif

#if defined(__SANITIZE_THREAD__)
#define SIMT_TSAN 1
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#else
#define SIMT_TSAN 0
#endif

// The switch itself runs half on one stack and half on another, which no sanitizer can follow.
#define SIMT_UNSANITIZED \
  __attribute__((noinline, no_sanitize("thread"), no_sanitize("address"), no_sanitize("undefined")))

namespace simt {

// Hides the emulator's own bookkeeping from TSan, which would otherwise see every fiber write it.
class Unwatched {
 public:
  Unwatched(const Unwatched&) = delete;
#if SIMT_TSAN
  Unwatched() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd("", 0);
    AnnotateIgnoreReadsEnd("", 0);
  }
#else
  Unwatched() {}
  ~Unwatched() {}
#endif
};

// A token carries what its releasers had done to whoever acquires it later. Only the address
// counts.
struct Token {
  char byte = 0;
};

inline void release([[maybe_unused]] Token* token) {
#if SIMT_TSAN
  __tsan_release(token);
#endif
}

inline void acquire([[maybe_unused]] Token* token) {
#if SIMT_TSAN
  __tsan_acquire(token);
#endif
}

// TSan's idea of "who runs now". It has a history of its own and no stack, so an extra one can also
// carry a history from one place to another (fences.h).
class Actor {
 public:
#if SIMT_TSAN
  // The new actor knows everything that the present one has done.
  void create() { handle_ = __tsan_create_fiber(0); }
  void adopt_present() { handle_ = __tsan_get_current_fiber(); }
  void destroy() {
    if (handle_) __tsan_destroy_fiber(handle_);
    handle_ = nullptr;
  }
  // Taking turns on one CPU orders nothing on a GPU: the flag keeps TSan from thinking it does.
  SIMT_UNSANITIZED void enter() {
    constexpr unsigned kNoSync = 1;
    __tsan_switch_to_fiber(handle_, kNoSync);
  }
  bool exists() const { return handle_ != nullptr; }

 private:
  void* handle_ = nullptr;
#else
  void create() {}
  void adopt_present() {}
  void destroy() {}
  void enter() {}
#endif
};

inline void poison([[maybe_unused]] const void* begin, [[maybe_unused]] size_t bytes) {
#if SIMT_ASAN
  ASAN_POISON_MEMORY_REGION(begin, bytes);
#endif
}

inline void unpoison([[maybe_unused]] const void* begin, [[maybe_unused]] size_t bytes) {
#if SIMT_ASAN
  ASAN_UNPOISON_MEMORY_REGION(begin, bytes);
#endif
}

}  // namespace simt
