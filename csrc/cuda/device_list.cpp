#include "device_list.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include "../memory_layout.h"
#include "launchers.h"

namespace zclip::cuda {
namespace {

constexpr int64_t kRowLimit = int64_t{1} << 30;  // what the tables of a launch can number

}  // namespace

DeviceList::DeviceList(const std::vector<Tensor>& tensors, const Place& place, Access access,
                       const char* op, const char* argument, Cut cut) {
  tensors_.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    DeviceTensor& entry = tensors_[i];
    STD_TORCH_CHECK(place.holds(tensor), "zclip::", op, ": ", argument, "[", i, "]: expected ",
                    place.name(), ", the device of the others, got another; call once for each");
    STD_TORCH_CHECK(find_format(tensor.scalar_type(), &entry.format), "zclip::", op, ": ", argument,
                    "[", i, "]: expected float32, bfloat16, float16 or float64, got another dtype");
    const int64_t numel = tensor.numel();
    entry.address = const_cast<void*>(tensor.const_data_ptr());
    entry.rows = cut == Cut::kRows && tensor.dim() > 1 ? tensor.size(0) : 1;
    entry.row_len = entry.rows > 0 ? numel / entry.rows : 0;
    has_float64_ |= entry.format == Format::kFloat64;
    rows_ += entry.rows;
    if (tensor.is_contiguous()) continue;

    const int64_t* strides = tensor.strides().data();
    const Layout layout = layout_of(tensor.dim(), tensor.sizes().data(), strides);
    STD_TORCH_CHECK(access == Access::kRead || !layout.overlaps, "zclip::", op, ": ", argument, "[",
                    i,
                    "]: expected memory of its own, got elements that share memory (expand()?); "
                    "pass a clone()");
    const bool rows_are_runs = entry.rows == 1 || strides[0] * entry.rows == numel;
    if (layout.dense && rows_are_runs) continue;
    const Tensor copy = torch::stable::contiguous(tensor);
    entry.address = const_cast<void*>(copy.const_data_ptr());
    copies_.push_back({tensor, copy});
  }
  STD_TORCH_CHECK(rows_ < kRowLimit, "zclip::", op, ": ", argument, ": expected fewer than ",
                  kRowLimit, " rows, got ", rows_);
}

Tensor DeviceList::scratch(const Tensor& like) const {
  return torch::stable::new_empty(like, {scratch_bytes(data(), count())},
                                  torch::headeronly::ScalarType::Byte);
}

void DeviceList::write_back() {
  for (Copy& gapped : copies_) torch::stable::copy_(gapped.original, gapped.copy);
}

}  // namespace zclip::cuda
