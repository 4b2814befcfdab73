// Memory of one resident block: its shared arrays, poisoned and fenced off by red zones, and the
// stacks of its threads, each above an unmapped page. Global memory is the caller's own.

#pragma once

#include <sys/mman.h>

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "sanitizers.h"

namespace simt {

constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 128 * 1024;        // room for a 32 KB argument copied more than once
constexpr size_t kSharedLimit = 48 * 1024;        // what CUDA grants __shared__ without opting in
constexpr size_t kRedZone = 64;                   // more than one 16-byte store past the end
constexpr size_t kSharedAlignment = 16;           // enough for every vector type
constexpr size_t kArenaBytes = 2 * kSharedLimit;  // leaves room for the red zones of many arrays
constexpr unsigned char kUnwritten = 0xff;        // reads as NaN, or as -1
constexpr unsigned char kCanary = 0xa5;

// One mapping: the arena, then a guard page and a stack for each thread.
class BlockMemory {
 public:
  explicit BlockMemory(unsigned threads)
      : threads_(threads), bytes_(kArenaBytes + threads * (kPage + kStackBytes)) {
    void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<char*>(mapped);
    for (unsigned t = 0; t < threads; ++t) mprotect(stack(t) - kPage, kPage, PROT_NONE);
  }
  ~BlockMemory() {
    unpoison(base_, kArenaBytes);
    munmap(base_, bytes_);
  }
  BlockMemory(const BlockMemory&) = delete;

  unsigned threads() const { return threads_; }
  char* arena() const { return base_; }
  char* stack(unsigned thread) const {
    return base_ + kArenaBytes + thread * (kPage + kStackBytes) + kPage;
  }

 private:
  unsigned threads_;
  size_t bytes_;
  char* base_ = nullptr;
};

// Names one ZCLIP_SHARED declaration. Its address is the key, so that each instance of a template
// has its own array and each call of a function finds the same one, as on the device.
struct SharedName {
  const char* name;
  const char* file;
  int line;
};

// The shared arrays of one block, placed when a thread first reaches their declaration.
class SharedMemory {
 public:
  explicit SharedMemory(char* arena) : arena_(arena) {
    unpoison(arena, kArenaBytes);
    memset(arena, kCanary, kRedZone);
    poison(arena, kArenaBytes);
  }

  // Null when the block has used up its shared memory.
  void* find_or_place(const SharedName& name, size_t bytes) {
    for (const Array& array : arrays_) {
      if (array.name == &name) return arena_ + array.begin;
    }
    const size_t begin = (end_ + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
    used_ += bytes;
    if (used_ > kSharedLimit || begin + bytes + kRedZone > kArenaBytes) return nullptr;
    unpoison(arena_ + end_, begin + bytes + kRedZone - end_);
    memset(arena_ + end_, kCanary, begin - end_);
    memset(arena_ + begin, kUnwritten, bytes);
    memset(arena_ + begin + bytes, kCanary, kRedZone);
    poison(arena_ + end_, begin - end_);
    poison(arena_ + begin + bytes, kRedZone);
    arrays_.push_back({&name, begin, bytes});
    end_ = begin + bytes + kRedZone;
    return arena_ + begin;
  }

  // Names the array whose red zone was written to; empty if none. This is how a plain build sees a
  // write out of bounds. A read is seen by ASan alone.
  std::string overrun() {
    unpoison(arena_, end_);
    for (const Array& array : arrays_) {
      const char* after = arena_ + array.begin + array.bytes;
      const bool is_intact = is_canary(arena_ + array.begin - kRedZone) && is_canary(after);
      if (is_intact) continue;
      return std::string("write outside shared array ") + array.name->name + ", declared at " +
             array.name->file + ":" + std::to_string(array.name->line);
    }
    return "";
  }

 private:
  struct Array {
    const SharedName* name;
    size_t begin, bytes;
  };

  static bool is_canary(const char* zone) {
    for (size_t i = 0; i < kRedZone; ++i) {
      if (static_cast<unsigned char>(zone[i]) != kCanary) return false;
    }
    return true;
  }

  char* arena_;
  std::vector<Array> arrays_;
  size_t used_ = 0;
  size_t end_ = kRedZone;  // of the last array's red zone
};

}  // namespace simt
