// A 64-bit hash of a tensor's bits, made of a sum so that its parts may be hashed anywhere.

#pragma once

#include <cstdint>

#include "hd.h"

namespace zclip {

constexpr int64_t kBytesPerWord = 8;

// The golden ratio, and the multipliers of MurmurHash3's finaliser.
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr uint64_t kFirstMultiplier = 0xff51afd7ed558ccdull;
constexpr uint64_t kSecondMultiplier = 0xc4ceb9fe1a85ec53ull;

// One-to-one in the word, so that a change of any one word always changes the sum. `key` is
// (index + 1) * kGolden, which a loop gets by adding kGolden.
ZCLIP_HD uint64_t mix(uint64_t word, uint64_t key) {
  uint64_t h = (word ^ key) * kFirstMultiplier;
  h ^= h >> 32;
  h *= kSecondMultiplier;
  return h ^ h >> 32;
}

// What the length adds, as a word at index -1: a tensor is told from the same one with zeros
// behind.
ZCLIP_HD uint64_t mix_length(uint64_t bytes) { return mix(bytes, 0); }

}  // namespace zclip
