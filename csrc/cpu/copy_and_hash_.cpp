// CPU backend of zclip::copy_and_hash_: all that a snapshot wants of memory, in one read of it.

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "hash_words.h"
#include "ops.h"
#include "parts.h"
#include "tensor_list.h"

namespace zclip::cpu {
namespace {

bool can_stream(const char* to) {
#if ZCLIP_HAS_AVX2
  return reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0;
#else
  (void)to;
  return false;
#endif
}

template <typename lane_t>
Seen copy_part(char* to, const Part& part, lane_t exponent, bool avx512) {
  if (!can_stream(to)) {
    return hash_bytes<lane_t, Copy::kCached>(to, part.data, part.begin, part.end, exponent, avx512);
  }
  const Seen seen =
      hash_bytes<lane_t, Copy::kStreamed>(to, part.data, part.begin, part.end, exponent, avx512);
#if ZCLIP_HAS_AVX2
  _mm_sfence();  // streamed stores are not ordered among others
#endif
  return seen;
}

// A number is NaN or Inf if all bits of its exponent are set.
Seen copy_numbers(char* to, const Part& part, const Tensor& source, bool avx512) {
  Format format;
  if (!find_format(source.scalar_type(), &format)) {
    return {copy_part<uint8_t>(to, part, 0, avx512).hash, false};
  }
  switch (format) {
    case Format::kFloat32:
      return copy_part<uint32_t>(to, part, 0x7f800000u, avx512);
    case Format::kBfloat16:
      return copy_part<uint16_t>(to, part, 0x7f80u, avx512);
    case Format::kFloat16:
      return copy_part<uint16_t>(to, part, 0x7c00u, avx512);
    default:
      return copy_part<uint64_t>(to, part, 0x7ff0000000000000ull, avx512);
  }
}

void check_pair(const Tensor& target, const Tensor& source, size_t i) {
  STD_TORCH_CHECK(target.is_cpu() && source.is_cpu(), "zclip::copy_and_hash_: pair ", i,
                  ": expected both on the CPU, got another device");
  STD_TORCH_CHECK(target.is_contiguous() && source.is_contiguous(), "zclip::copy_and_hash_: pair ",
                  i, ": expected contiguous tensors, got strides");
  STD_TORCH_CHECK(target.scalar_type() == source.scalar_type() && target.numel() == source.numel(),
                  "zclip::copy_and_hash_: pair ", i,
                  ": expected one dtype and number of elements, got two");
  const auto* to = static_cast<const char*>(target.const_data_ptr());
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  const auto bytes = static_cast<int64_t>(source.numel() * source.element_size());
  STD_TORCH_CHECK(bytes == 0 || to + bytes <= from || from + bytes <= to,
                  "zclip::copy_and_hash_: pair ", i,
                  ": expected memory of their own, got tensors that share some");
}

}  // namespace

Tensor copy_and_hash_(const std::vector<Tensor>& targets, const std::vector<Tensor>& sources) {
  STD_TORCH_CHECK(
      !sources.empty() && targets.size() == sources.size(),
      "zclip::copy_and_hash_: expected a target for each source, and at least one, got ",
      targets.size(), " for ", sources.size());
  const auto count = static_cast<int64_t>(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) check_pair(targets[i], sources[i], i);
  Tensor rows =
      torch::stable::new_empty(sources[0], {count, 2}, torch::headeronly::ScalarType::Long);
  auto* row = static_cast<uint64_t*>(rows.mutable_data_ptr());
  std::vector<char*> to(sources.size());
  for (size_t i = 0; i < sources.size(); ++i) {
    to[i] = static_cast<char*>(targets[i].mutable_data_ptr());
    row[2 * i] = mix_length(static_cast<uint64_t>(sources[i].numel() * sources[i].element_size()));
    row[2 * i + 1] = 0;
  }
  const std::vector<Part> parts = cut_into_parts(sources);
  const bool avx512 = use_avx512();
  std::vector<Seen> seen(parts.size());
  for_each_part(parts, [&](int64_t p) {
    const size_t i = parts[p].tensor;
    seen[p] = copy_numbers(to[i], parts[p], sources[i], avx512);
  });
  for (size_t p = 0; p < parts.size(); ++p) {
    row[2 * parts[p].tensor] += seen[p].hash;
    row[2 * parts[p].tensor + 1] |= static_cast<uint64_t>(seen[p].full);
  }
  return rows;
}

}  // namespace zclip::cpu
