// Hashes bytes and, on the way, copies them and looks for NaN and Inf: memory is read once.
// Integers have the same bits on any instruction set; the 64-bit multiplications that the hash is
// made of are what AVX-512 has and AVX2 has not.

#pragma once

#include <cstdint>
#include <cstring>

#include "../math/fingerprint.h"
#include "cpu_path.h"
#if ZCLIP_HAS_AVX2
#include <emmintrin.h>
#endif

namespace zclip::cpu {

constexpr int64_t kBytesPerLine = 64;
constexpr int64_t kWordsPerLine = kBytesPerLine / kBytesPerWord;
constexpr int64_t kPrefetch = 8192;  // bytes ahead; the hardware's own stops at the end of a page

// A copy that nobody reads soon need neither be fetched first nor push out what is in use: it is
// streamed past the caches where its address allows.
enum class Copy { kNone, kCached, kStreamed };

struct Seen {
  uint64_t hash;
  bool full;  // whether all bits of the exponent are set in any lane: NaN or Inf
};

template <Copy kCopy>
ZCLIP_ALWAYS_INLINE void copy_line(char* to, const char* from) {
  if constexpr (kCopy == Copy::kCached) std::memcpy(to, from, kBytesPerLine);
#if ZCLIP_HAS_AVX2
  if constexpr (kCopy == Copy::kStreamed) {  // of instructions that every x86-64 has
    for (int v = 0; v < 4; ++v) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + v,
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + v));
    }
  }
#endif
}

template <typename lane_t, Copy kCopy>
ZCLIP_ALWAYS_INLINE Seen walk_lines(char* to, const char* from, int64_t lines, uint64_t key,
                                    lane_t exponent) {
  Seen seen = {0, false};
  for (int64_t i = 0; i < lines; ++i, from += kBytesPerLine) {
    uint64_t words[kWordsPerLine];
    std::memcpy(words, from, kBytesPerLine);
    for (int64_t w = 0; w < kWordsPerLine; ++w, key += kGolden) seen.hash += mix(words[w], key);
    if constexpr (kCopy != Copy::kNone) {
      lane_t lanes[kBytesPerLine / sizeof(lane_t)];
      std::memcpy(lanes, from, kBytesPerLine);
      for (const lane_t lane : lanes) seen.full |= (lane & exponent) == exponent;
      copy_line<kCopy>(to + i * kBytesPerLine, from);
    }
  }
  return seen;
}

#if ZCLIP_HAS_AVX512
template <typename lane_t, Copy kCopy>
ZCLIP_AVX512 Seen walk_lines_avx512(char* to, const char* from, int64_t lines, uint64_t key,
                                    lane_t exponent) {
  typedef uint64_t Words __attribute__((vector_size(kBytesPerLine)));
  typedef lane_t Lanes __attribute__((vector_size(kBytesPerLine)));
  Words hash = {}, keys = {};
  for (int64_t w = 0; w < kWordsPerLine; ++w) keys[w] = key + w * kGolden;
  Lanes full = {};
  for (int64_t i = 0; i < lines; ++i, from += kBytesPerLine) {
    __builtin_prefetch(from + kPrefetch);
    Words words;
    std::memcpy(&words, from, kBytesPerLine);
    Words h = (words ^ keys) * kFirstMultiplier;  // mix(), eight at a time
    h ^= h >> 32;
    h *= kSecondMultiplier;
    hash += h ^ h >> 32;
    keys += kWordsPerLine * kGolden;
    if constexpr (kCopy != Copy::kNone) {
      Lanes lanes;
      std::memcpy(&lanes, from, kBytesPerLine);
      full |= static_cast<Lanes>((lanes & exponent) == exponent);
      copy_line<kCopy>(to + i * kBytesPerLine, from);
    }
  }
  Seen seen = {0, false};
  for (int64_t w = 0; w < kWordsPerLine; ++w) seen.hash += hash[w];
  for (size_t l = 0; l < kBytesPerLine / sizeof(lane_t); ++l) seen.full |= full[l] != 0;
  return seen;
}
#endif

// Takes the bytes [begin, end) of a tensor; begin is at a word. A last word that they do not fill
// is padded with zeros. `to` is where the tensor's copy begins.
template <typename lane_t, Copy kCopy>
Seen hash_bytes(char* to, const char* from, int64_t begin, int64_t end, lane_t exponent,
                bool avx512) {
  const int64_t lines = (end - begin) / kBytesPerLine;
  uint64_t key = (static_cast<uint64_t>(begin / kBytesPerWord) + 1) * kGolden;
  char* const target = kCopy == Copy::kNone ? nullptr : to + begin;
#if ZCLIP_HAS_AVX512
  Seen seen = avx512 ? walk_lines_avx512<lane_t, kCopy>(target, from + begin, lines, key, exponent)
                     : walk_lines<lane_t, kCopy>(target, from + begin, lines, key, exponent);
#else
  (void)avx512;
  Seen seen = walk_lines<lane_t, kCopy>(target, from + begin, lines, key, exponent);
#endif
  key += static_cast<uint64_t>(lines * kWordsPerLine) * kGolden;
  for (int64_t byte = begin + lines * kBytesPerLine; byte < end; byte += kBytesPerWord) {
    uint64_t word = 0;
    const int64_t rest = end - byte < kBytesPerWord ? end - byte : kBytesPerWord;
    std::memcpy(&word, from + byte, rest);
    seen.hash += mix(word, key);
    key += kGolden;
    if constexpr (kCopy != Copy::kNone) {
      lane_t lanes[kBytesPerWord / sizeof(lane_t)];
      std::memcpy(lanes, &word, sizeof word);
      for (const lane_t lane : lanes) seen.full |= (lane & exponent) == exponent;
      std::memcpy(to + byte, from + byte, rest);
    }
  }
  return seen;
}

}  // namespace zclip::cpu
