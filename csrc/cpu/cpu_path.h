// Which instructions the CPU kernels use, chosen at run time so that one wheel runs on any x86-64.

#pragma once

#include <cstdint>

#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
#define ZCLIP_HAS_AVX2 1
#define ZCLIP_AVX2 __attribute__((target("avx2,f16c")))
#define ZCLIP_ALWAYS_INLINE inline __attribute__((always_inline))
#else
#define ZCLIP_HAS_AVX2 0
#define ZCLIP_ALWAYS_INLINE inline
#endif

#if ZCLIP_HAS_AVX2 && defined(__x86_64__) && !defined(__clang__)
#define ZCLIP_HAS_AVX512 1
#define ZCLIP_AVX512 \
  __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512")))
#else
#define ZCLIP_HAS_AVX512 0
#endif

namespace zclip::cpu {

// How far ahead of the reads to ask for memory. The hardware stops at page ends; this does not.
constexpr int64_t kPrefetchBytes = 2048;

// True if this machine has AVX2 and F16C and the environment does not say ZCLIP_CPU=portable. Both
// paths give the same bits; the portable one serves every other machine.
bool use_avx2();

// Likewise for AVX-512 with its F, DQ, BW and VL parts; ZCLIP_CPU=avx2 forbids them.
bool use_avx512();

}  // namespace zclip::cpu
