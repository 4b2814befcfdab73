// CPU backend of zclip::fingerprint: a sum over words, so threads may take any part of it.

#include "../math/fingerprint.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>

#include "ops.h"

namespace zclip::cpu {
namespace {

constexpr int64_t kBytesPerPart = 1 << 17;  // a multiple of a word; as much as a float64 chunk
constexpr int64_t kPartsPerThread = 8;      // below a second thread costs more than it brings

struct Part {
  const char* data;  // of the whole tensor
  int64_t begin;     // in bytes, at a word
  int64_t end;
  size_t tensor;
};

uint64_t hash_part(const Part& part) {
  uint64_t hash = 0;
  uint64_t key = (static_cast<uint64_t>(part.begin / kBytesPerWord) + 1) * kGolden;
  int64_t byte = part.begin;
  for (; byte + kBytesPerWord <= part.end; byte += kBytesPerWord, key += kGolden) {
    uint64_t word;
    std::memcpy(&word, part.data + byte, sizeof word);
    hash += mix(word, key);
  }
  if (byte < part.end) {
    uint64_t word = 0;
    std::memcpy(&word, part.data + byte, part.end - byte);
    hash += mix(word, key);
  }
  return hash;
}

}  // namespace

Tensor fingerprint(std::vector<Tensor> tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "zclip::fingerprint: wanted at least one tensor");
  Tensor hashes = torch::stable::new_empty(tensors[0], {static_cast<int64_t>(tensors.size())},
                                           torch::headeronly::ScalarType::Long);
  auto* hash_of = static_cast<uint64_t*>(hashes.mutable_data_ptr());
  std::vector<Part> parts;
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(tensors[i].is_cpu(), "zclip::fingerprint: tensors[", i,
                    "] is not on the CPU like the others; give one call one device");
    // Index order counts, not memory order: a transposed view hashes as its copy does.
    if (!tensors[i].is_contiguous()) tensors[i] = torch::stable::contiguous(tensors[i]);
    const auto bytes = static_cast<int64_t>(tensors[i].numel() * tensors[i].element_size());
    const auto* data = static_cast<const char*>(tensors[i].const_data_ptr());
    hash_of[i] = mix_length(static_cast<uint64_t>(bytes));
    for (int64_t begin = 0; begin < bytes; begin += kBytesPerPart) {
      parts.push_back({data, begin, std::min(begin + kBytesPerPart, bytes), i});
    }
  }
  std::vector<uint64_t> sums(parts.size());
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), kPartsPerThread,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t p = begin; p < end; ++p) sums[p] = hash_part(parts[p]);
                              });
  for (size_t p = 0; p < parts.size(); ++p) hash_of[parts[p].tensor] += sums[p];
  return hashes;
}

}  // namespace zclip::cpu
