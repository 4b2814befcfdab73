// A fiber: a stack, and the instruction at which it will go on. The switch is seven instructions
// for x86-64, because swapcontext makes a system call and a launch switches a million times.

#pragma once

#include "sanitizers.h"

#if !defined(__x86_64__)
#error "tests/simt/fiber.h switches stacks on x86-64 only"
#endif

namespace simt {

struct Fiber {
  void* stack_pointer = nullptr;
  const void* stack = nullptr;  // lowest address
  size_t stack_bytes = 0;
  void* fake_stack = nullptr;  // ASan's, while the fiber is away
  Actor actor;
};

// Saves the registers a callee must keep (the compiler has saved the rest) and swaps the stacks.
__attribute__((naked)) SIMT_UNSANITIZED inline void swap_stacks(void** /*save*/, void* /*load*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

// Returns when somebody switches back to `from`; never, if it is finished.
SIMT_UNSANITIZED inline void switch_fiber(Fiber& from, Fiber& to,
                                          [[maybe_unused]] bool from_is_finished = false) {
#if SIMT_ASAN
  __sanitizer_start_switch_fiber(from_is_finished ? nullptr : &from.fake_stack, to.stack,
                                 to.stack_bytes);
#endif
  to.actor.enter();
  swap_stacks(&from.stack_pointer, to.stack_pointer);
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// The first thing a fiber's entry does. Learns where the stack of whoever started it lies.
SIMT_UNSANITIZED inline void arrive_on_new_stack([[maybe_unused]] Fiber& came_from) {
#if SIMT_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &came_from.stack, &came_from.stack_bytes);
#endif
}

// Lays out the stack so that the first switch "returns" into entry, which must not return itself.
inline void prepare_fiber(Fiber& fiber, char* stack, size_t stack_bytes, void (*entry)()) {
  constexpr int kSavedRegisters = 6;
  unpoison(stack, stack_bytes);  // frames abandoned by the stack's last owner left red zones here
  void** top = reinterpret_cast<void**>(stack + stack_bytes);
  *--top = nullptr;  // where entry would return to; also gives it the alignment a call would
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.stack = stack;
  fiber.stack_bytes = stack_bytes;
}

}  // namespace simt
