// Memory in pieces of 16 bytes, the widest a thread can load at once, and what stands before and
// behind them.

#pragma once

#include <cstdint>
#include <cstring>

#include "block_join.cuh"

namespace zclip::cuda {

constexpr int kVectorBytes = 16;

// Loads that a thread has under way before it uses the first of them. Fewer would leave the memory
// idle; 4 of 16 bytes by 1,024 threads are 64 KB for each multiprocessor.
constexpr int kInFlight = 4;

template <typename number_t>
struct Vector {
  static constexpr int kWidth = kVectorBytes / sizeof(number_t);
  number_t numbers[kWidth];
};

template <typename number_t>
__device__ __forceinline__ Vector<number_t> load_vector(const number_t* vectors, int index) {
  const uint4 bits = reinterpret_cast<const uint4*>(vectors)[index];
  Vector<number_t> vector;
  memcpy(&vector, &bits, sizeof bits);
  return vector;
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

}  // namespace zclip::cuda
