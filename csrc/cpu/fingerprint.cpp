// CPU backend of zclip::fingerprint: a sum over words, so threads may take any part of it.

#include "../math/fingerprint.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "hash_words.h"
#include "ops.h"
#include "parts.h"

namespace zclip::cpu {

Tensor fingerprint(std::vector<Tensor> tensors) {
  STD_TORCH_CHECK(!tensors.empty(), "zclip::fingerprint: expected at least one tensor, got none");
  Tensor hashes = torch::stable::new_empty(tensors[0], {static_cast<int64_t>(tensors.size())},
                                           torch::headeronly::ScalarType::Long);
  auto* hash_of = static_cast<uint64_t*>(hashes.mutable_data_ptr());
  for (size_t i = 0; i < tensors.size(); ++i) {
    STD_TORCH_CHECK(
        tensors[i].is_cpu(), "zclip::fingerprint: tensors[", i,
        "]: expected a tensor on the CPU like the others, got another device; call once for each");
    // Index order counts, not memory order: a transposed view hashes as its copy does.
    if (!tensors[i].is_contiguous()) tensors[i] = torch::stable::contiguous(tensors[i]);
    hash_of[i] = mix_length(static_cast<uint64_t>(tensors[i].numel() * tensors[i].element_size()));
  }
  const std::vector<Part> parts = cut_into_parts(tensors);
  const bool avx512 = use_avx512();
  std::vector<uint64_t> sums(parts.size());
  for_each_part(parts, [&](int64_t p) {
    const Part& part = parts[p];
    sums[p] =
        hash_bytes<uint8_t, Copy::kNone>(nullptr, part.data, part.begin, part.end, 0, avx512).hash;
  });
  for (size_t p = 0; p < parts.size(); ++p) hash_of[parts[p].tensor] += sums[p];
  return hashes;
}

}  // namespace zclip::cpu
