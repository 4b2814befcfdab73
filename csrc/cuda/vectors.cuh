// Memory in pieces of 16 bytes, the widest a thread can load at once, and what stands before and
// behind them.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../math/number.h"
#include "block_join.cuh"

namespace zclip::cuda {

constexpr int kVectorBytes = 16;

// Loads that a thread has under way before it uses the first of them. Fewer would leave the memory
// idle; 4 of 16 bytes by 1,024 threads are 64 KB for each multiprocessor.
constexpr int kInFlight = 4;
constexpr int kRound = kInFlight * kThreads;  // vectors that a block loads together

// Whole vectors, one behind the other, whatever their format.
struct Run {
  const uint4* vectors;
  int count;
};

// What a thread loads together: every kSize-th vector from `first` on, as far as the run goes.
struct Round {
  uint4 vectors[kInFlight];
};

// Zeros stand for what lies behind the end.
template <int kSize = kThreads>
__device__ __forceinline__ Round load_round(const Run& run, int first) {
  Round round = {};
#pragma unroll
  for (int k = 0; k < kInFlight; ++k) {
    const int v = first + k * kSize;
    if (v < run.count) round.vectors[k] = run.vectors[v];
  }
  return round;
}

template <typename number_t>
constexpr int kWidthOf = kVectorBytes / static_cast<int>(sizeof(number_t));

template <typename number_t>
struct Vector {
  static constexpr int kWidth = kWidthOf<number_t>;
  number_t numbers[kWidth];
};

template <typename number_t>
__device__ __forceinline__ Vector<number_t> vector_of(const uint4& bits) {
  Vector<number_t> vector;
  memcpy(&vector, &bits, sizeof bits);
  return vector;
}

template <typename number_t>
__device__ __forceinline__ Vector<number_t> load_vector(const number_t* vectors, int index) {
  return vector_of<number_t>(reinterpret_cast<const uint4*>(vectors)[index]);
}

template <typename number_t>
__device__ __forceinline__ void store_vector(number_t* vectors, int index,
                                             const Vector<number_t>& vector) {
  uint4 bits;
  memcpy(&bits, &vector, sizeof bits);
  reinterpret_cast<uint4*>(vectors)[index] = bits;
}

// A run of elements: fewer than a vector until 16 bytes are reached, whole vectors, fewer again.
template <typename number_t>
struct Pieces {
  number_t* head;
  number_t* body;  // 16-byte aligned
  number_t* tail;
  int head_len;  // in elements
  int vectors;
  int tail_len;
};

template <typename number_t>
__device__ __forceinline__ Pieces<number_t> pieces_of(number_t* data, int len) {
  constexpr int kWidth = Vector<number_t>::kWidth;
  const auto past = static_cast<int>(reinterpret_cast<uintptr_t>(data) % kVectorBytes);
  const int to_go = (kVectorBytes - past) % kVectorBytes / static_cast<int>(sizeof(number_t));
  const int head = to_go < len ? to_go : len;
  const int vectors = (len - head) / kWidth;
  number_t* body = data + head;
  number_t* tail = body + vectors * kWidth;
  return {data, body, tail, head, vectors, len - head - vectors * kWidth};
}

// Number i of a vector, widened. Taken from whole words: what is kept in registers until then is
// the vector as it was loaded, not its numbers.
template <typename number_t>
__device__ __forceinline__ auto widened(const uint4& bits, int i) {
  const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
  if constexpr (std::is_same_v<number_t, double>) {
    return double_of(static_cast<uint64_t>(words[2 * i + 1]) << 32 | words[2 * i]);
  } else if constexpr (std::is_same_v<number_t, float>) {
    return float_of(words[i]);
  } else if constexpr (std::is_same_v<number_t, Bfloat16>) {
    return float_of(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
  } else {
    return widen(number_t{static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16))});
  }
}

}  // namespace zclip::cuda
