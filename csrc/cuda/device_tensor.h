// What the host tells a launcher about a tensor. Knows neither CUDA nor torch.

#pragma once

#include <cstdint>

#include "../math/grad_stats.h"

namespace zclip::cuda {

struct DeviceTensor {
  void* address;
  int64_t row_len;  // in elements
  int64_t rows;     // 1 unless cut by rows
  Format format;
};

// A block measures this many elements at a time, whatever the device: the same bits on all of them.
// Two of the CPU's chunks, because one block adds up the results of all.
constexpr int64_t kDeviceChunk = 2 * kChunk;

ZCLIP_HD int64_t num_chunks(const DeviceTensor& tensor) {
  return tensor.rows * ((tensor.row_len + kDeviceChunk - 1) / kDeviceChunk);
}

}  // namespace zclip::cuda
