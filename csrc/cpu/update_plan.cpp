#include "update_plan.h"

#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>

#include "cpu_path.h"
#include "float_mode.h"
#include "for_each_chunk.h"

namespace zclip::cpu {

using torch::headeronly::ScalarType;

// What is the same for all chunks of a tensor.
struct UpdatePlan::Row {
  Loop loop;
  int flags;
  double coef;
  uint32_t key;
  uint32_t scalars;  // where its scalars stand
};

// What is the same for all tensors of a group that are as old as each other.
struct UpdatePlan::Scalars {
  UpdateScalars<float> narrow;
  UpdateScalars<double> wide;
};

namespace {

constexpr int64_t kParamsPerThread = 4096;  // whose addresses are worth a thread
constexpr int64_t kCacheBytes = 1 << 23;    // a step of more does not stay in the caches
constexpr int64_t kTensorsAhead = 12;       // of the one that is looked at, to fetch from memory

bool has(const std::vector<Tensor>& list, size_t i) { return !list.empty() && list[i].numel() > 0; }

// The address of an entry of the state, or null if there is none. Raises if it does not fit.
char* state_address(const std::vector<Tensor>& list, size_t i, const Span& param,
                    const Tensor& tensor, const char* op, const char* argument) {
  if (!has(list, i)) return nullptr;
  const Tensor& entry = list[i];
  const ScalarType wanted =
      param.format == Format::kFloat64 ? ScalarType::Double : ScalarType::Float;
  STD_TORCH_CHECK(entry.is_cpu() && entry.scalar_type() == wanted, "zclip::", op, ": ", argument,
                  "[", i, "]: expected ", wanted == ScalarType::Double ? "float64" : "float32",
                  " on the CPU, got another dtype or device");
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const bool fits =
      entry.numel() == param.numel &&
      (tensor.is_contiguous() ? entry.is_contiguous()
                              : std::equal(strides.begin(), strides.end(), entry.strides().begin(),
                                           entry.strides().end()) &&
                                    std::equal(sizes.begin(), sizes.end(), entry.sizes().begin(),
                                               entry.sizes().end()));
  STD_TORCH_CHECK(fits, "zclip::", op, ": ", argument, "[", i, "]: expected the strides and ",
                  param.numel, " elements of params[", i, "], got ", entry.numel(),
                  " elements or other strides");
  return static_cast<char*>(entry.mutable_data_ptr());
}

// The instructions to use, and how many float32 numbers a vector of theirs holds.
enum class Isa { kPortable, kAvx2, kAvx512 };

Isa best_isa() { return use_avx512() ? Isa::kAvx512 : use_avx2() ? Isa::kAvx2 : Isa::kPortable; }

template <bool kTelemetry, typename value_t>
UpdateSlot update_portable(const ChunkUpdate& chunk, const UpdateScalars<value_t>& scalars) {
  return update_chunk<kTelemetry, 8>(chunk, scalars);
}

#if ZCLIP_HAS_AVX2
template <bool kTelemetry, typename value_t>
ZCLIP_AVX2 UpdateSlot update_avx2(const ChunkUpdate& chunk, const UpdateScalars<value_t>& scalars) {
  return update_chunk<kTelemetry, 8>(chunk, scalars);
}
#endif

#if ZCLIP_HAS_AVX512
template <bool kTelemetry, typename value_t>
ZCLIP_AVX512 UpdateSlot update_avx512(const ChunkUpdate& chunk,
                                      const UpdateScalars<value_t>& scalars) {
  return update_chunk<kTelemetry, 16>(chunk, scalars);
}
#endif

template <bool kTelemetry, typename value_t>
UpdateSlot update_with(Isa isa, const ChunkUpdate& chunk, const UpdateScalars<value_t>& scalars) {
#if ZCLIP_HAS_AVX512
  if (isa == Isa::kAvx512) return update_avx512<kTelemetry>(chunk, scalars);
#endif
#if ZCLIP_HAS_AVX2
  if (isa == Isa::kAvx2) return update_avx2<kTelemetry>(chunk, scalars);
#endif
  (void)isa;
  return update_portable<kTelemetry>(chunk, scalars);
}

template <typename value_t>
UpdateSlot update_on(const ChunkUpdate& chunk, const UpdateScalars<value_t>& scalars,
                     bool telemetry, Isa isa) {
  return telemetry ? update_with<true>(isa, chunk, scalars)
                   : update_with<false>(isa, chunk, scalars);
}

}  // namespace

UpdatePlan::UpdatePlan(Algorithm algorithm, std::vector<Tensor> params, OptimState state,
                       Tensor ledger, std::vector<int64_t> sizes, bool telemetry, const char* op)
    : algorithm_(algorithm),
      params_(std::move(params)),
      state_(std::move(state)),
      ledger_(std::move(ledger)),
      sizes_(std::move(sizes)),
      telemetry_(telemetry),
      list_(params_, TensorList::Access::kWrite, op, "params") {
  const size_t count = params_.size();
  const struct {
    const std::vector<Tensor>& list;
    const char* name;
  } lists[] = {{state_.firsts, "firsts"},
               {state_.seconds, "seconds"},
               {state_.maxima, "maxima"},
               {state_.steps, "steps"}};
  for (const auto& [list, name] : lists) {
    STD_TORCH_CHECK(list.empty() || list.size() == count, "zclip::", op, ": ", name,
                    ": expected none or one for each of ", count, " params, got ", list.size());
  }
  int64_t listed = 0;
  for (const int64_t size : sizes_) listed += size;
  STD_TORCH_CHECK(listed == static_cast<int64_t>(count), "zclip::", op,
                  ": sizes: expected a sum of ", count, ", the number of params, got ", listed);
  STD_TORCH_CHECK(ledger_.is_cpu() && ledger_.scalar_type() == ScalarType::Long &&
                      ledger_.is_contiguous() &&
                      ledger_.numel() == static_cast<int64_t>(count) * kNumLedger,
                  "zclip::", op, ": ledger: expected a contiguous int64 tensor of shape [", count,
                  ", ", int{kNumLedger}, "] on the CPU, got ", ledger_.numel(), " elements");
  STD_TORCH_CHECK(algorithm != Algorithm::kAdam || count == 0 ||
                      (!state_.firsts.empty() && !state_.seconds.empty() && !state_.steps.empty()),
                  "zclip::", op, ": Adam: expected firsts, seconds and steps, got an empty list");
  STD_TORCH_CHECK(algorithm != Algorithm::kLion || count == 0 || !state_.firsts.empty(),
                  "zclip::", op, ": Lion: expected firsts, got an empty list");
  strides_.resize(count);
  entries_.resize(count);
  for (const Tensor& param : params_) dtypes_.push_back(param.scalar_type());
  const auto watch = [&](const Tensor& tensor) {
    watched_.push_back({tensor.get(), tensor.const_data_ptr()});
  };
  for (size_t i = 0; i < count; ++i) {
    const Span& span = list_.spans()[i];
    STD_TORCH_CHECK(span.dense, "zclip::", op, ": params[", i,
                    "]: expected a dense tensor, got one that does not fill one run of memory");
    if (!params_[i].is_contiguous()) {
      strides_[i].assign(span.strides, span.strides + span.dim);
    }
    Entry& entry = entries_[i];
    entry.first = state_address(state_.firsts, i, span, params_[i], op, "firsts");
    entry.second = state_address(state_.seconds, i, span, params_[i], op, "seconds");
    entry.maximum = state_address(state_.maxima, i, span, params_[i], op, "maxima");
    if (has(state_.steps, i)) {
      const ScalarType type = state_.steps[i].scalar_type();
      STD_TORCH_CHECK(state_.steps[i].is_cpu() && state_.steps[i].numel() == 1 &&
                          (type == ScalarType::Float || type == ScalarType::Double),
                      "zclip::", op, ": steps[", i,
                      "]: expected one float32 or float64 number on the CPU, got something else");
      entry.step = state_.steps[i].mutable_data_ptr();
      entry.step_is_double = type == ScalarType::Double;
    }
    first_watched_.push_back(static_cast<int64_t>(watched_.size()));
    watch(params_[i]);
    for (const auto& [list, name] : lists) {
      if (has(list, i)) watch(list[i]);
    }
  }
  first_watched_.push_back(static_cast<int64_t>(watched_.size()));
  int64_t bytes = 0;
  for (size_t i = 0; i < count; ++i) {
    const Entry& entry = entries_[i];
    const int64_t states =
        (entry.first != nullptr) + (entry.second != nullptr) + (entry.maximum != nullptr);
    const int64_t size = bytes_per_element(list_.spans()[i].format);
    bytes += list_.spans()[i].numel * (2 * size + std::max(size, int64_t{4}) * states);
  }
  is_cached_ = bytes <= kCacheBytes;
}

UpdatePlan::~UpdatePlan() = default;

bool UpdatePlan::is_current() const {
  std::atomic<bool> is_current{true};
  torch::stable::parallel_for(0, count(), kParamsPerThread, [&](int64_t begin, int64_t end) {
    if (!are_current(begin, end)) is_current.store(false, std::memory_order_relaxed);
  });
  return is_current.load();
}

bool UpdatePlan::are_current(int64_t begin, int64_t end) const {
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t k = first_watched_[i]; k < first_watched_[i + 1]; ++k) {
      // What a handle points to begins with the address of the tensor. If it ever should not, this
      // fetches something else in advance and does no harm.
      const auto ahead = std::min(k + kTensorsAhead, static_cast<int64_t>(watched_.size()) - 1);
      __builtin_prefetch(*reinterpret_cast<const void* const*>(watched_[ahead].handle));
      const void* address = nullptr;
      STABLE_TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(watched_[k].handle, &address));
      if (address != watched_[k].address) return false;
    }
    const Tensor& param = params_[i];
    if (param.numel() != list_.spans()[i].numel) return false;
    if (param.scalar_type() != dtypes_[i]) return false;  // to() may reuse the freed memory
    if (param.is_contiguous() != strides_[i].empty()) return false;
    if (strides_[i].empty()) continue;
    const auto strides = param.strides();
    if (!std::equal(strides.begin(), strides.end(), strides_[i].begin(), strides_[i].end())) {
      return false;
    }
  }
  return true;
}

void UpdatePlan::check_gradients(const TensorList& grads, const char* op) const {
  STD_TORCH_CHECK(grads.spans().size() == params_.size(), "zclip::", op,
                  ": grads: expected one for each of ", params_.size(), " params, got ",
                  grads.spans().size());
  for (size_t i = 0; i < params_.size(); ++i) {
    const Span &grad = grads.spans()[i], &param = list_.spans()[i];
    if (grad.numel == 0) continue;  // there is none in this step
    const bool both_wide = (grad.format == Format::kFloat64) == (param.format == Format::kFloat64);
    STD_TORCH_CHECK(both_wide && grad.numel == param.numel, "zclip::", op, ": grads[", i,
                    "]: expected the dtype and ", param.numel, " elements of params[", i, "], got ",
                    grad.numel, " elements or another dtype");
    // Spans of contiguous tensors have no strides.
    const bool same = grad.strides == nullptr
                          ? strides_[i].empty()
                          : grad.dense && static_cast<size_t>(grad.dim) == strides_[i].size() &&
                                std::equal(strides_[i].begin(), strides_[i].end(), grad.strides);
    STD_TORCH_CHECK(same || param.numel < 2, "zclip::", op, ": grads[", i,
                    "]: expected the strides of params[", i, "], got others");
  }
}

// Raises if a parameter with a gradient lacks state that its settings ask for.
void UpdatePlan::fill_rows(const TensorList& grads, const StepNumbers& numbers) {
  rows_.resize(params_.size());
  scalars_.clear();
  const auto* ledger = static_cast<const int64_t*>(ledger_.const_data_ptr());
  size_t i = 0;
  for (size_t group = 0; group < sizes_.size(); ++group) {
    const double* settings = numbers.settings + group * kNumOptimSettings;
    const int flags = static_cast<int>(settings[kOptimFlags]);
    const double lr = numbers.rates == nullptr ? settings[kLr] : numbers.rates[group];
    double last = -1.0;
    for (int64_t k = 0; k < sizes_[group]; ++k, ++i) {
      const Entry& entry = entries_[i];
      const auto ahead = std::min(static_cast<int64_t>(i) + kTensorsAhead, count() - 1);
      __builtin_prefetch(entries_[ahead].step);
      const double updates =
          entry.step == nullptr  ? static_cast<double>(ledger[i * kNumLedger + kUpdates])
          : entry.step_is_double ? *static_cast<const double*>(entry.step)
                                 : static_cast<double>(*static_cast<const float*>(entry.step));
      if (k == 0 || updates != last) {  // powers are slow, and most tensors are equally old
        scalars_.push_back({scalars_of<float>(algorithm_, settings, lr, updates),
                            scalars_of<double>(algorithm_, settings, lr, updates)});
        last = updates;
      }
      Row& row = rows_[i];
      row.scalars = static_cast<uint32_t>(scalars_.size() - 1);
      row.flags = flags;
      row.loop = loop_of(algorithm_, flags, entry.first != nullptr);
      const bool is_complete = (entry.first != nullptr || algorithm_ == Algorithm::kSgd) &&
                               (entry.second != nullptr || algorithm_ != Algorithm::kAdam) &&
                               (entry.maximum != nullptr || row.loop != Loop::kAmsgrad);
      STD_TORCH_CHECK(is_complete || grads.spans()[i].numel == 0,
                      "zclip::optim_update_: state of params[", i,
                      "]: expected all moments that its settings need, got an empty one");
      const double coef = numbers.coefs == nullptr ? kKeep : numbers.coefs[i];
      const double sign = (flags & kMaximize) ? -1.0 : 1.0;
      row.coef = coef == kRefuse ? 0.0 : sign * coef / numbers.grad_scale;
      if (coef == kRefuse) row.flags |= kDropNonFinite;
      row.key =
          (flags & kStochastic) ? rounding_key(numbers.seed, updates, static_cast<int64_t>(i)) : 0;
    }
  }
}

void UpdatePlan::update(const TensorList& grads, const StepNumbers& numbers, double* telemetry,
                        float* summary) {
  const Isa isa = best_isa();
  {
    const FloatMode mode;
    fill_rows(grads, numbers);
  }
  slots_.resize(list_.chunks().size());
  for_each_chunk(list_, [&](int64_t c, const Chunk& chunk) {
    const auto t = static_cast<size_t>(chunk.tensor);
    const Span &param = list_.spans()[t], &grad = grads.spans()[t];
    if (grad.numel == 0) return;
    const Row& row = rows_[t];
    const Entry& entry = entries_[t];
    const int64_t size = param.format == Format::kFloat64 ? 8 : 4;
    const auto at = [&](char* state) -> void* {
      return state == nullptr ? nullptr : state + chunk.begin * size;
    };
    const ChunkUpdate work = {row.loop,
                              chunk.len,
                              param.data + chunk.begin * bytes_per_element(param.format),
                              param.format,
                              grad.data + chunk.begin * bytes_per_element(grad.format),
                              grad.format,
                              at(entry.first),
                              at(entry.second),
                              at(entry.maximum),
                              row.coef,
                              (row.flags & kDropNonFinite) != 0,
                              (row.flags & kStochastic) != 0,
                              row.key,
                              chunk.begin,
                              is_cached_};
    const Scalars& scalars = scalars_[row.scalars];
    slots_[c] = param.format == Format::kFloat64 ? update_on(work, scalars.wide, telemetry_, isa)
                                                 : update_on(work, scalars.narrow, telemetry_, isa);
  });
  const FloatMode mode;
  close(grads, telemetry, summary);
}

// Slots are added in index order, whichever thread filled them.
void UpdatePlan::close(const TensorList& grads, double* telemetry, float* summary) {
  auto* ledger = static_cast<int64_t*>(ledger_.mutable_data_ptr());
  size_t c = 0;
  double weights = 0.0, updates = 0.0, first_bad = -1.0, first_foreign = -1.0;
  int flags = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    UpdateSlot sum = {};
    for (; c < slots_.size() && list_.chunks()[c].tensor == static_cast<int32_t>(i); ++c) {
      const UpdateSlot& slot = slots_[c];
      sum.weight_sumsq += slot.weight_sumsq;
      sum.update_sumsq += slot.update_sumsq;
      for (int k = 0; k < 3; ++k) {
        sum.bad[k] += slot.bad[k];
        sum.loaded[k] += slot.loaded[k];
        sum.stored[k] += slot.stored[k];
      }
    }
    if (grads.spans()[i].numel == 0 && list_.spans()[i].numel > 0) {
      if (telemetry_) std::fill_n(telemetry + i * kNumTelemetry, int64_t{kNumTelemetry}, 0.0);
      continue;
    }
    const Entry& state = entries_[i];
    if (state.step != nullptr && state.step_is_double) {
      *static_cast<double*>(state.step) += 1.0;
    } else if (state.step != nullptr) {
      *static_cast<float*>(state.step) += 1.0f;
    }
    int64_t* entry = ledger + i * kNumLedger;
    entry[kUpdates] += 1;
    const bool is_wide = list_.spans()[i].format == Format::kFloat64;
    const uint64_t mask = is_wide ? ~uint64_t{0} : uint64_t{0xffffffffu};
    int foreign = 0;
    for (int k = 0; k < 3; ++k) {
      const bool differs = static_cast<uint64_t>(entry[k]) != (sum.loaded[k] & mask);
      if (telemetry_ && entry[kIsKnown] != 0 && differs) foreign |= 1 << k;
      entry[k] = static_cast<int64_t>(sum.stored[k] & mask);
    }
    entry[kIsKnown] = telemetry_ ? 1 : 0;
    if (!telemetry_) continue;
    double* row = telemetry + i * kNumTelemetry;
    row[kWeightSumSq] = sum.weight_sumsq;
    row[kUpdateSumSq] = sum.update_sumsq;
    for (int k = 0; k < 3; ++k) row[kWeightBad + k] = sum.bad[k];
    row[kForeign] = foreign;
    weights += sum.weight_sumsq;
    updates += sum.update_sumsq;
    const bool bad_state = sum.bad[1] + sum.bad[2] > 0.0;
    if (sum.bad[0] > 0.0) flags |= kBadWeight;
    if (bad_state) flags |= kBadState;
    if (foreign != 0) flags |= kForeignWrite;
    const auto index = static_cast<double>(i);
    if ((sum.bad[0] > 0.0 || bad_state) && first_bad < 0.0) first_bad = index;
    if (foreign != 0 && first_foreign < 0.0) first_foreign = index;
  }
  summary[kTaken] = 1.0f;
  summary[kHealthFlags] = static_cast<float>(flags);
  summary[kFirstBadTensor] = static_cast<float>(first_bad);
  summary[kFirstForeign] = static_cast<float>(first_foreign);
  summary[kWeightNorm] = static_cast<float>(std::sqrt(weights));
  summary[kUpdateNorm] = static_cast<float>(std::sqrt(updates));
}

void report_skipped(int64_t count, double* telemetry, float* summary) {
  std::fill_n(telemetry, count * kNumTelemetry, 0.0);
  std::fill_n(summary, int64_t{kNumSummary}, 0.0f);
  summary[kFirstBadTensor] = summary[kFirstForeign] = -1.0f;
}

}  // namespace zclip::cpu
