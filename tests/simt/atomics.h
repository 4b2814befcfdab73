// Atomics and __threadfence under their CUDA names. Fibers take turns, so plain arithmetic is
// atomic here; what other threads may conclude from it is told to TSan by fences.h.

#pragma once

#include <type_traits>

#include "block.h"

namespace simt {

inline void maybe_lose_turn() {
  if (running.scheduler->preempts()) give_up_turn();
}

// The access itself is hidden from TSan: CUDA orders a thread's later plain access to the same
// address after every atomic that its own atomic has observed (so `*ticket = 0` by the last block
// is no race), and TSan cannot order a single address.
template <typename T, typename Update>
T read_modify_write(T* address, Update update) {
  Unwatched unwatched;
  maybe_lose_turn();
  const T old = *address;
  *address = update(old);
  Thread& thread = *running.thread;
  thread.fences.atomic(address, thread.fiber.actor, running.stranger);
  maybe_lose_turn();
  return old;
}

template <typename T>
inline constexpr bool kHasAtomics =
    std::is_same_v<T, int> || std::is_same_v<T, unsigned> || std::is_same_v<T, unsigned long long>;

// Keeps the value argument out of template deduction, so that atomicAdd(&unsigned, 1) compiles
// as it does with CUDA's overloads.
template <typename T>
using Same = std::common_type_t<T>;

}  // namespace simt

inline void __threadfence() {
  simt::Unwatched unwatched;
  simt::running.thread->fences.fence();
  simt::maybe_lose_turn();
}

// Floats have no atomics here on purpose: their order of addition would change from run to run.
template <typename T>
T atomicAdd(T* address, simt::Same<T> value) {
  static_assert(simt::kHasAtomics<T>, "int, unsigned or unsigned long long");
  // Unsigned arithmetic, because the device wraps where signed overflow in C++ is undefined.
  using Wrapping = std::make_unsigned_t<T>;
  return simt::read_modify_write(address, [value](T old) {
    return static_cast<T>(static_cast<Wrapping>(old) + static_cast<Wrapping>(value));
  });
}

template <typename T>
T atomicMax(T* address, simt::Same<T> value) {
  static_assert(simt::kHasAtomics<T>, "int, unsigned or unsigned long long");
  return simt::read_modify_write(address, [value](T old) { return old > value ? old : value; });
}

template <typename T>
T atomicMin(T* address, simt::Same<T> value) {
  static_assert(simt::kHasAtomics<T>, "int, unsigned or unsigned long long");
  return simt::read_modify_write(address, [value](T old) { return old < value ? old : value; });
}

template <typename T>
T atomicOr(T* address, simt::Same<T> value) {
  static_assert(simt::kHasAtomics<T>, "int, unsigned or unsigned long long");
  return simt::read_modify_write(address, [value](T old) { return old | value; });
}

template <typename T>
T atomicExch(T* address, simt::Same<T> value) {
  static_assert(simt::kHasAtomics<T>, "int, unsigned or unsigned long long");
  return simt::read_modify_write(address, [value](T) { return value; });
}

template <typename T>
T atomicCAS(T* address, simt::Same<T> expected, simt::Same<T> value) {
  static_assert(simt::kHasAtomics<T>, "int, unsigned or unsigned long long");
  return simt::read_modify_write(address, [=](T old) { return old == expected ? value : old; });
}

// Counts up to `last` and wraps to 0: the ticket that resets itself.
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return simt::read_modify_write(address,
                                 [last](unsigned old) { return old >= last ? 0u : old + 1; });
}
