// Runs every kernel of csrc/cuda against a plain loop over the same numbers, without Python and
// torch: quick to build, so that sanitizers and mutated kernels can be run through it.
//
//   kernel_check first_seed seeds [name of one check]

#include "../../csrc/cuda/launchers.cu"
#include "../../csrc/cuda/update_launcher.cu"

#include "kernel_memory.h"

#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

namespace kernel_check {
namespace {

constexpr double kTolerance = 1e-6;
const cuda::Queue kQueue = {nullptr, 0};
constexpr int64_t kStep = cuda::kThreads;  // vectors that a block loads at once

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::logic_error(what);
}

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  return a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

bool is_close(double got, double want) {
  return got == want || std::fabs(got - want) <= kTolerance * std::fabs(want);
}

void expect_guards(const Tensors& tensors) {
  for (const GuardedTensor& t : tensors) expect(t.guards_are_intact(), "wrote outside a tensor");
}

// Every format; lengths around a vector, the vectors a block has in flight, and a chunk; aligned
// and not; some empty.
Tensors make_tensors(simt::Random& random) {
  Tensors tensors;
  const int64_t chunk = cuda::kDeviceChunk;
  for (const Format format :
       {Format::kFloat32, Format::kBfloat16, Format::kFloat16, Format::kFloat64}) {
    const int64_t width = cuda::kVectorBytes / bytes_per_element(format);
    const int64_t lengths[] = {0,
                               1,
                               width - 1,
                               width,
                               width + 1,
                               kStep * width + 1,
                               4 * kStep * width - 1,
                               4 * kStep * width + width + 1,
                               SIMT_TSAN ? 77 : chunk - 1,
                               SIMT_TSAN ? 78 : chunk,
                               SIMT_TSAN ? 79 : chunk + 1};
    for (const int64_t numel : lengths) {
      tensors.emplace_back(format, numel, random.below(static_cast<unsigned>(width)));
      fill(tensors.back(), random);
    }
  }
  tensors.emplace_back(Format::kBfloat16, (SIMT_TSAN ? 2 : 3) * chunk + 5, 1);
  fill(tensors.back(), random);
  tensors.emplace_back(Format::kFloat32, 2 * chunk + 9, 2);
  fill(tensors.back(), random);
  tensors.emplace_back(Format::kFloat32, 0, 0);
  return tensors;
}

std::vector<GradStats> true_rows(const Tensors& tensors) {
  std::vector<GradStats> rows;
  for (const GuardedTensor& tensor : tensors) {
    GradStats row = {};
    for (int64_t i = 0; i < tensor.numel(); ++i) observe(row, tensor.get(i));
    rows.push_back(row);
  }
  return rows;
}

void expect_rows(const std::vector<GradStats>& rows, const std::vector<GradStats>& want) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string place = " of tensor " + std::to_string(i);
    expect(rows[i].nan == want[i].nan && rows[i].inf == want[i].inf, "counts" + place);
    expect(is_close(rows[i].sumsq, want[i].sumsq), "sum of squares" + place);
  }
}

std::vector<GradStats> measure(const std::vector<DeviceTensor>& list, Scratch& scratch) {
  std::vector<GradStats> rows(list.size(), GradStats{NAN, NAN, NAN});
  cuda::launch_grad_stats(list.data(), static_cast<int64_t>(list.size()), scratch.data(),
                          rows.data(), nullptr, {}, kQueue);
  return rows;
}

void poison(Tensors& tensors, simt::Random& random) {
  for (GuardedTensor& tensor : tensors) {
    if (tensor.numel() == 0 || random.one_in(2)) continue;
    const double values[] = {NAN, INFINITY, -INFINITY};
    const int64_t places[] = {0, tensor.numel() - 1,
                              static_cast<int64_t>(random.next() % tensor.numel())};
    tensor.set(places[random.below(3)], values[random.below(3)]);
  }
}

void check_stats(simt::Random& random) {
  Tensors tensors = make_tensors(random);
  const std::vector<DeviceTensor> list = device_list(tensors);
  Scratch scratch(list, random);
  cuda::emulated_multiprocessors = 2;
  const std::vector<GradStats> rows = measure(list, scratch);
  expect_rows(rows, true_rows(tensors));
  // Again with the same memory, on smaller and larger devices.
  for (const int64_t multiprocessors : {1, 2, 5}) {
    if (SIMT_TSAN && multiprocessors != 1) continue;
    cuda::emulated_multiprocessors = multiprocessors;
    expect(same_bits(measure(list, scratch), rows), "another grid, other bits");
  }
  cuda::emulated_multiprocessors = 2;
  poison(tensors, random);
  for (GuardedTensor& tensor : tensors) {
    if (tensor.format() != Format::kFloat16 && random.one_in(4)) fill(tensor, random, 1e-25);
    if (tensor.format() == Format::kFloat32 && random.one_in(4)) fill(tensor, random, 3e38);
  }
  expect_rows(measure(list, scratch), true_rows(tensors));
  // Zeros, and zeros with one number whose square is nothing in float32.
  for (GuardedTensor& tensor : tensors) {
    fill(tensor, random, 0.0);
    if (tensor.format() == Format::kFloat16 || tensor.numel() == 0 || random.one_in(4)) continue;
    const int64_t places[] = {0, tensor.numel() - 1,
                              static_cast<int64_t>(random.next() % tensor.numel())};
    tensor.set(places[random.below(3)], 1e-30);
  }
  expect_rows(measure(list, scratch), true_rows(tensors));
  expect_guards(tensors);
}

// A rule in the block that comes last has the bits of the same rule on the same rows.
using Serial = std::function<void(const GradStats*, int64_t, double* state, double*, float*)>;

void check_rule(cuda::Rule rule, size_t columns, const Serial& serial, simt::Random& random) {
  Tensors tensors;
  for (int i = 0; i < 9; ++i) {
    // The last one may be finished by the whole block, whose first thread then writes its row.
    const bool large = i == 8 && rule.id == RuleId::kGlobalNorm;
    const int64_t numel = large ? 2 * cuda::kDeviceChunk + 5 : 40 * i;
    tensors.emplace_back(i % 2 ? Format::kFloat32 : Format::kBfloat16, numel, i % 3);
  }
  const auto count = static_cast<int64_t>(tensors.size());
  const std::vector<DeviceTensor> list = device_list(tensors);
  std::vector<double> state(columns), want_state(columns), alone_state(columns);
  for (int step = 0; step < (SIMT_TSAN ? 3 : 12); ++step) {
    for (GuardedTensor& tensor : tensors) fill(tensor, random, step % 4 == 3 ? 50.0 : 1.0);
    if (step % 5 == 4) tensors[3].set(7, step % 2 ? NAN : INFINITY);
    Scratch scratch(list, random);
    std::vector<GradStats> rows(count);
    std::vector<double> coefs(count, NAN), want(count), alone(count);
    std::vector<float> verdict(kNumVerdict, NAN), want_verdict(kNumVerdict), said(kNumVerdict);
    float norm = -1.0f;
    rule.state = state.data();
    cuda::launch_grad_stats(list.data(), count, scratch.data(), rows.data(), &rule,
                            {coefs.data(), verdict.data(), &norm, false}, kQueue);
    serial(rows.data(), count, want_state.data(), want.data(), want_verdict.data());
    rule.state = alone_state.data();
    cuda::launch_rule(rule, rows.data(), count, {alone.data(), said.data(), nullptr, false},
                      kQueue);
    expect(same_bits(coefs, want) && same_bits(alone, want), "coefficients of a rule");
    expect(same_bits(verdict, want_verdict) && same_bits(said, want_verdict), "verdict of a rule");
    expect(same_bits(state, want_state) && same_bits(alone_state, want_state), "state of a rule");
    expect(memcmp(&norm, &verdict[kNorm], sizeof norm) == 0, "norm of a rule");
  }
}

// The rule of math/rules.h with these settings, one tensor after the other.
Serial one_by_one(const cuda::Rule& rule) {
  return
      [rule](const GradStats* rows, int64_t count, double* state, double* coefs, float* verdict) {
        const auto* loss = static_cast<const double*>(rule.loss.address);
        find_rule(static_cast<int64_t>(rule.id))
            ->apply(rows, count, loss, rule.settings, state, coefs, verdict);
      };
}

void check_rules(simt::Random& random) {
  constexpr int kTensors = 9;
  const double loss = 2.5;
  // More norms in AutoClip's history than threads in the smallest build, so that counting takes
  // two rounds.
  const std::vector<std::pair<RuleId, std::vector<double>>> rules = {
      {RuleId::kGlobalNorm, {1.0, static_cast<double>(NonFinite::kSkip)}},
      {RuleId::kZClip, {0.97, 2.5, 1.0, 1e-6, 3, 0, 1.0, 0, 0, 0}},
      {RuleId::kAdaGc, {1.04, 0.99, 1.0, 1e-6, 2, 0, 0}},
      {RuleId::kSpikeSkip, {4, 3.0, 2, 0}},
      {RuleId::kAutoClip, {30.0, 7, 0}},
  };
  for (const auto& [id, settings] : rules) {
    cuda::Rule rule = {};
    rule.id = id;
    std::copy(settings.begin(), settings.end(), rule.settings);
    if (id == RuleId::kSpikeSkip) rule.loss = {&loss, Format::kFloat64};
    const RuleRow& row = *find_rule(static_cast<int64_t>(id));
    check_rule(rule, row.state_size(rule.settings, kTensors), one_by_one(rule), random);
  }
}

// More rows than a block has threads, equal ones among them, with and without bad ones: sums in the
// order of the index, and the tensor to blame, have the bits of one thread alone.
void check_totals(simt::Random& random) {
  const int64_t count = 2 * cuda::kThreads + 3;
  for (const int kind : {0, 1, 2, 3}) {
    std::vector<GradStats> rows(count);
    for (GradStats& row : rows) row.sumsq = (1 + random.below(1000)) * 0.37;
    if (kind == 1) rows[random.below(static_cast<unsigned>(count))].nan = 2.0;
    if (kind == 2) rows[count - 1].inf = rows[count - 1 - cuda::kThreads].nan = 1.0;
    if (kind == 3) rows = std::vector<GradStats>(count);  // zeros: the first is to blame
    std::vector<double> coefs(count), want(count), state(kNumCounters), want_state(kNumCounters);
    std::vector<float> verdict(kNumVerdict), said(kNumVerdict);
    cuda::Rule rule = {};
    rule.id = RuleId::kGlobalNorm;
    rule.state = state.data();
    rule.settings[0] = 1.0;
    rule.settings[1] = static_cast<double>(NonFinite::kSkip);
    cuda::launch_rule(rule, rows.data(), count, {coefs.data(), verdict.data(), nullptr, false},
                      kQueue);
    const double coef = global_norm_rule(total_of(rows.data(), count), 1.0, NonFinite::kSkip,
                                         want_state.data(), said.data());
    std::fill_n(want.data(), count, coef);
    expect(same_bits(coefs, want) && same_bits(verdict, said), "totals of many rows");

    const double settings[] = {1.04, 0.99, 1.0, 1e-6, 1, 0, 0};
    const AdaGcSettings adagc = AdaGc::settings_of(settings);
    std::vector<double> gammas(kGammaColumn + count, 1.5), want_gammas;
    gammas[kSteps] = 5.0;
    gammas[kClipCount] = gammas[kSkipCount] = 0.0;
    want_gammas = gammas;
    rule.id = RuleId::kAdaGc;
    rule.state = gammas.data();
    std::copy(std::begin(settings), std::end(settings), rule.settings);
    cuda::launch_rule(rule, rows.data(), count, {coefs.data(), verdict.data(), nullptr, false},
                      kQueue);
    adagc_rule(rows.data(), count, adagc, want_gammas.data(), want.data(), said.data());
    expect(same_bits(coefs, want) && same_bits(verdict, said), "AdaGC of many rows");
    expect(same_bits(gammas, want_gammas), "gammas of many rows");
  }
}

// A history longer than a block has threads, with and without a NaN in it.
void check_percentile(simt::Random& random) {
  const int64_t history = cuda::kThreads + 9;
  for (const bool has_nan : {false, true}) {
    std::vector<double> state(kHistoryColumn + history), coefs(1), want_coefs(1);
    for (double& column : state) column = random.below(50) * 0.37;
    for (int c = 0; c < kHistorySeenColumn; ++c) state[c] = 0.0;
    state[kHistorySeenColumn] = static_cast<double>(history + 3);
    if (has_nan) state[kHistoryColumn + 40] = NAN;
    std::vector<double> want_state = state;
    const GradStats row = {25.0, 0.0, 0.0};
    std::vector<float> verdict(kNumVerdict), want(kNumVerdict);
    cuda::Rule rule = {};
    rule.id = RuleId::kAutoClip;
    rule.state = state.data();
    rule.settings[0] = 61.0;
    rule.settings[1] = static_cast<double>(history);
    rule.settings[2] = static_cast<double>(OnNonFinite::kOfficial);
    cuda::launch_rule(rule, &row, 1, {coefs.data(), verdict.data(), nullptr, false}, kQueue);
    want_coefs[0] = auto_clip_rule(total_of(&row, 1), 61.0, history, OnNonFinite::kOfficial,
                                   want_state.data(), want.data());
    expect(same_bits(state, want_state) && same_bits(verdict, want), "percentile of a history");
    expect(same_bits(coefs, want_coefs), "coefficient by percentile");
  }
}

template <typename number_t>
void scale_as_told(number_t& x, double coef) {
  if (coef == kRefuse) {
    x = number_t{};
  } else if (std::fabs(coef) < kSmallestNormalFloat && coef != 0.0) {
    scale_one_wide(x, coef);
  } else {
    scale_one(x, static_cast<decltype(widen(x))>(coef));
  }
}

// Applies change(x) to element i of a tensor's bytes.
template <typename Change>
void change_element(Format format, char* data, int64_t i, Change&& change) {
  switch (format) {
    case Format::kFloat32:
      return change(reinterpret_cast<float*>(data)[i]);
    case Format::kBfloat16:
      return change(reinterpret_cast<Bfloat16*>(data)[i]);
    case Format::kFloat16:
      return change(reinterpret_cast<Float16*>(data)[i]);
    default:
      return change(reinterpret_cast<double*>(data)[i]);
  }
}

template <typename Change>
std::vector<std::vector<char>> changed(const Tensors& tensors, Change&& change) {
  std::vector<std::vector<char>> all;
  for (size_t t = 0; t < tensors.size(); ++t) {
    all.push_back(tensors[t].copy());
    for (int64_t i = 0; i < tensors[t].numel(); ++i) {
      change_element(tensors[t].format(), all.back().data(), i, [&](auto& x) { change(x, t); });
    }
  }
  return all;
}

void expect_content(const Tensors& tensors, const std::vector<std::vector<char>>& want,
                    const std::string& op) {
  for (size_t t = 0; t < tensors.size(); ++t) {
    expect(same_bits(tensors[t].copy(), want[t]), op + ", tensor " + std::to_string(t));
  }
  expect_guards(tensors);
}

void check_rewriting(simt::Random& random) {
  Tensors tensors = make_tensors(random);
  const std::vector<DeviceTensor> list = device_list(tensors);
  const auto count = static_cast<int64_t>(list.size());
  const double choices[] = {0.3, kKeep, 0.007, kRefuse, 1e-41, 0.0, kKeep};
  std::vector<double> coefs(count);
  for (double& coef : coefs) coef = choices[random.below(7)];
  auto want = changed(tensors, [&](auto& x, size_t t) {
    if (coefs[t] != kKeep) scale_as_told(x, coefs[t]);
  });
  cuda::launch_scale(list.data(), count, coefs.data(), nullptr, kQueue);
  expect_content(tensors, want, "scale_");

  for (GuardedTensor& tensor : tensors) fill(tensor, random);
  poison(tensors, random);
  const std::vector<GradStats> rows = true_rows(tensors);
  want = changed(tensors, [&](auto& x, size_t t) {
    zero_one_if_nonfinite(x);
    if (coefs[t] != kKeep) scale_as_told(x, coefs[t]);
  });
  cuda::launch_scale(list.data(), count, coefs.data(), rows.data(), kQueue);
  expect_content(tensors, want, "scale_ that drops bad elements");

  poison(tensors, random);
  want = changed(tensors, [](auto& x, size_t) { zero_one_if_nonfinite(x); });
  cuda::launch_zero_nonfinite(list.data(), count, true_rows(tensors).data(), kQueue);
  expect_content(tensors, want, "zero_nonfinite_");

  want = changed(tensors, [](auto& x, size_t) {
    auto bound = x;
    narrow(static_cast<decltype(widen(x))>(0.1), &bound);
    clamp_one(x, widen(bound));
  });
  cuda::launch_clamp(list.data(), count, 0.1, kQueue);
  expect_content(tensors, want, "clamp_");

  // A gradient whose coefficient is 1 is not even read: no address, no fault.
  std::vector<DeviceTensor> nowhere = list;
  for (DeviceTensor& tensor : nowhere) tensor.address = reinterpret_cast<void*>(64);
  const std::vector<double> keep(count, kKeep);
  cuda::launch_scale(nowhere.data(), count, keep.data(), nullptr, kQueue);

  // Nor is it if another gradient is scaled, be it the first, the last or any.
  for (const size_t scaled : {size_t{1}, list.size() - 2, size_t{10}, size_t{21}}) {
    const DeviceTensor hidden = nowhere[scaled];
    nowhere[scaled] = list[scaled];
    std::vector<double> one = keep;
    one[scaled] = 0.5;
    want =
        changed(tensors, [&](auto& x, size_t t) { scale_as_told(x, t == scaled ? 0.5 : kKeep); });
    // On two blocks, so that a block steps from one tensor's end exactly to the next one's.
    cuda::emulated_multiprocessors = 1;
    cuda::launch_scale(nowhere.data(), count, one.data(), nullptr, kQueue);
    cuda::emulated_multiprocessors = 2;
    expect_content(tensors, want, "scale_ of one");
    nowhere[scaled] = hidden;
  }
}

void check_powers(simt::Random& random) {
  Tensors tensors;
  for (const int64_t numel : {5, 700, SIMT_TSAN ? 9 : 40000, 0}) {
    tensors.emplace_back(Format::kFloat32, numel, 1);
    fill(tensors.back(), random);
  }
  poison(tensors, random);
  const std::vector<DeviceTensor> list = device_list(tensors);
  for (const double p : {1.0, 3.0, 0.5, static_cast<double>(INFINITY)}) {
    Scratch scratch(list, random);
    std::vector<GradStats> rows(list.size()), want = true_rows(tensors);
    cuda::launch_power_stats(list.data(), static_cast<int64_t>(list.size()), scratch.data(),
                             rows.data(), p, kQueue);
    for (size_t t = 0; t < tensors.size(); ++t) {
      want[t].sumsq = 0.0;
      for (int64_t i = 0; i < tensors[t].numel(); ++i) {
        const double size = std::fabs(tensors[t].get(i));
        if (!is_finite(size)) continue;
        want[t].sumsq =
            std::isinf(p) ? std::fmax(want[t].sumsq, size) : want[t].sumsq + std::pow(size, p);
      }
    }
    expect_rows(rows, want);
  }
}

void check_fingerprints(simt::Random& random) {
  Tensors tensors;
  for (const int64_t numel : {0, 1, 3, 4, 7, 8, 9, 513, 16384, 16389, 70001}) {
    if (SIMT_TSAN && numel > 600 && numel != 16389) continue;
    tensors.emplace_back(Format::kBfloat16, numel, random.one_in(2) ? 0 : random.below(8));
    fill(tensors.back(), random);
  }
  std::vector<DeviceTensor> list = device_list(tensors);
  for (DeviceTensor& tensor : list) tensor.row_len *= 2;  // in bytes
  Scratch scratch(list, random);
  std::vector<int64_t> hashes(list.size());
  cuda::launch_fingerprint(list.data(), static_cast<int64_t>(list.size()), scratch.data(),
                           hashes.data(), kQueue);
  for (size_t t = 0; t < list.size(); ++t) {
    std::vector<char> bytes = tensors[t].copy();
    uint64_t want = mix_length(bytes.size());
    bytes.resize((bytes.size() + 7) / 8 * 8);
    for (size_t word = 0; word < bytes.size() / 8; ++word) {
      uint64_t value;
      memcpy(&value, bytes.data() + 8 * word, sizeof value);
      want += mix(value, (word + 1) * kGolden);
    }
    expect(static_cast<uint64_t>(hashes[t]) == want, "fingerprint " + std::to_string(t));
  }
}

void check_agc(simt::Random& random) {
  Tensors grads, weights;
  std::vector<std::pair<int64_t, int64_t>> shapes = {{1, 50}, {3, 40}, {70, 5}, {2, 0}};
  shapes.push_back({2, SIMT_TSAN ? 9 : cuda::kDeviceChunk + 3});
  shapes.push_back({2, cuda::kLongestOfWarp});
  shapes.push_back({2, cuda::kLongestOfWarp + 1});
  shapes.push_back({cuda::kWarps + 1, 17});
  // More tensors than a table of rows holds, and than 4 KB of arguments do.
  for (int i = 0; i < cuda::kAgcCapacity; ++i) shapes.push_back({1 + i % 2, 3});
  shapes.push_back({1, 3});  // so that the last group of chunks is not full
  size_t num_rows = 0;
  for (const auto& [rows, row_len] : shapes) {
    grads.emplace_back(Format::kFloat32, rows * row_len, 1, rows);
    weights.emplace_back(Format::kBfloat16, rows * row_len, 0, rows);
    fill(grads.back(), random);
    fill(weights.back(), random, grads.size() == 1 ? 1e6 : 8.0);  // too large for a clip, once
    num_rows += rows;
  }
  // A row of zeros but for one number whose square is nothing in float32.
  grads.emplace_back(Format::kFloat32, 200, 0);
  weights.emplace_back(Format::kBfloat16, 200, 0);
  fill(grads.back(), random, 0.0);
  fill(weights.back(), random);
  grads.back().set(41, 1e-30);
  ++num_rows;
  const auto grad_list = device_list(grads), weight_list = device_list(weights);
  const auto count = static_cast<int64_t>(grads.size());
  for (const bool refuse : {false, true}) {
    if (refuse) grads[1].set(41, NAN);
    std::vector<double> want_coefs, row_coefs(num_rows), per_tensor(2 * count), coefs(count),
        state(3);
    std::vector<GradStats> stats(count);
    std::vector<float> verdict(kNumVerdict);
    double left_over = 0.0, norm = 0.0;
    std::vector<std::vector<char>> want;
    for (int64_t t = 0; t < count; ++t) {
      const DeviceTensor& tensor = grad_list[t];
      want.push_back(grads[t].copy());
      double least = kKeep;
      for (int64_t r = 0; r < tensor.rows; ++r) {
        double grad = 0.0, weight = 0.0;
        for (int64_t i = r * tensor.row_len; i < (r + 1) * tensor.row_len; ++i) {
          grad += grads[t].get(i) * grads[t].get(i);
          weight += weights[t].get(i) * weights[t].get(i);
        }
        const double coef = refuse ? kRefuse : agc_row(sqrt(grad), sqrt(weight), 0.1, 1e-3);
        least = lesser_coef(coef, least);
        left_over += grad * coef * coef;
        for (int64_t i = r * tensor.row_len; i < (r + 1) * tensor.row_len; ++i) {
          if (coef != kKeep) scale_as_told(reinterpret_cast<float*>(want[t].data())[i], coef);
        }
      }
      want_coefs.push_back(refuse ? kRefuse : least);
    }
    const std::vector<GradStats> want_rows = true_rows(grads);
    Scratch grad_scratch(grad_list, random), weight_scratch(weight_list, random);
    const cuda::AgcCall call = {0.1,
                                1e-3,
                                OnNonFinite::kSkip,
                                state.data(),
                                stats.data(),
                                per_tensor.data(),
                                row_coefs.data()};
    cuda::launch_agc(grad_list.data(), weight_list.data(), count, grad_scratch.data(),
                     weight_scratch.data(), call, {coefs.data(), verdict.data(), &norm, true},
                     kQueue);
    expect_rows(stats, want_rows);
    for (int64_t t = 0; t < count; ++t) {
      expect(is_close(coefs[t], want_coefs[t]), "least coefficient of agc_");
      const auto* expected = reinterpret_cast<const float*>(want[t].data());
      for (int64_t i = 0; i < grads[t].numel(); ++i) {
        expect(is_close(grads[t].get(i), expected[i]), "gradient after agc_");
      }
    }
    expect(verdict[kBlocked] == (refuse ? 1.0f : 0.0f), "agc_ blocks");
    expect(((static_cast<int>(verdict[kFlags]) & kClipped) != 0) == !refuse, "agc_ clips");
    if (!refuse) expect(is_close(verdict[kClippedNorm], sqrt(left_over)), "norm left by agc_");
    expect(std::isnan(norm) == refuse && state[kSteps] == 1.0, "norm and state of agc_");
    expect_guards(grads);
  }
}

void check_watch_loss(simt::Random& random) {
  std::vector<double> state(kNumLossState), want_state(kNumLossState);
  const LossSettings settings = {3.0, 2, 0.9, 2};
  for (int step = 0; step < 8; ++step) {
    const float loss = step == 6 ? NAN : 2.0f + static_cast<float>(random.below(100)) * 0.1f;
    std::vector<float> verdict(kNumVerdict), want(kNumVerdict);
    cuda::launch_watch_loss({&loss, Format::kFloat32}, settings, state.data(), verdict.data(),
                            kQueue);
    watch_loss_rule(loss, settings, want_state.data(), want.data());
    expect(same_bits(state, want_state) && same_bits(verdict, want), "watch_loss_");
  }
}

// More tensors than a launch can carry: the rows of all, and a rule that sees all.
void check_splitting(simt::Random& random) {
  const int64_t count = SIMT_TSAN ? 300 : 2 * cuda::LargeTable::kCapacity + 3;
  cuda::emulates_old_driver = random.one_in(2);
  cuda::emulated_multiprocessors = 1;
  Tensors tensors;
  for (int64_t i = 0; i < count; ++i) {
    // The last has more chunks than what stood there in the table before, and than blocks.
    tensors.emplace_back(Format::kFloat32, i + 1 == count ? 2 * cuda::kDeviceChunk + 3 : i % 5, 0);
    fill(tensors.back(), random);
  }
  const std::vector<DeviceTensor> list = device_list(tensors);
  Scratch scratch(list, random);
  std::vector<GradStats> rows(count);
  std::vector<double> coefs(count), state(kNumCounters);
  std::vector<float> verdict(kNumVerdict);
  cuda::Rule rule = {};
  rule.id = RuleId::kGlobalNorm;
  rule.state = state.data();
  rule.settings[0] = 1.0;
  const uint64_t before = simt::counters.launches;
  cuda::launch_grad_stats(list.data(), count, scratch.data(), rows.data(), &rule,
                          {coefs.data(), verdict.data(), nullptr, false}, kQueue);
  const auto want = true_rows(tensors);
  expect_rows(rows, want);
  const bool large = ZCLIP_LARGE_ARGUMENTS && !cuda::emulates_old_driver;
  const int64_t capacity = large ? cuda::LargeTable::kCapacity : cuda::SmallTable::kCapacity;
  const auto launches = static_cast<int64_t>(simt::counters.launches - before);
  expect(launches == (count + capacity - 1) / capacity, "number of launches");
  expect(state[kSteps] == 1.0, "a rule is applied once");
  const double norm = sqrt(total_of(want.data(), count).sum.sumsq);
  const auto scaled = changed(tensors, [&](auto& x, size_t t) { scale_as_told(x, coefs[t]); });
  cuda::launch_scale(list.data(), count, coefs.data(), nullptr, kQueue);
  expect_content(tensors, scaled, "scale_ in several launches");
  expect(is_close(coefs[0], 1.0 / norm) && coefs[0] == coefs[count - 1], "coefficient of all");
  std::vector<double> one(count, kKeep);
  one[count - 1] = 0.5;
  const auto last_halved = changed(tensors, [&](auto& x, size_t t) { scale_as_told(x, one[t]); });
  cuda::launch_scale(list.data(), count, one.data(), nullptr, kQueue);
  expect_content(tensors, last_halved, "scale_ of the last in several launches");
  cuda::emulates_old_driver = false;
  cuda::emulated_multiprocessors = 2;
}

// A parameter, its gradient and its moments.
struct Updated {
  GuardedTensor p, g, m, v, largest;
  float step = 3.0f;

  // `past` is how many elements each of them lies past an address that allows wide loads.
  Updated(Format format, Format grad_format, int64_t numel, simt::Random& random,
          const std::array<int64_t, 5>& past)
      : p(format, numel, past[0]),
        g(grad_format, numel, past[1]),
        m(wide(format), numel, past[2]),
        v(wide(format), numel, past[3]),
        largest(wide(format), numel, past[4]) {
    for (GuardedTensor* tensor : {&p, &g, &m, &v, &largest}) fill(*tensor, random);
    for (int64_t i = 0; i < numel; ++i) v.set(i, std::fabs(v.get(i)));
  }
  Updated(Format format, int64_t numel, simt::Random& random)
      : Updated(format, format, numel, random,
                random.below(2) == 0 ? std::array<int64_t, 5>{} : anywhere(random)) {}

  static std::array<int64_t, 5> anywhere(simt::Random& random) {
    std::array<int64_t, 5> past;
    for (int64_t& elements : past) elements = random.below(3);
    return past;
  }
  static Format wide(Format format) {
    return format == Format::kFloat64 ? Format::kFloat64 : Format::kFloat32;
  }
  std::vector<char> content() const {
    std::vector<char> all;
    for (const GuardedTensor* tensor : {&p, &m, &v, &largest}) {
      const std::vector<char> one = tensor->copy();
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
};

// What an update does to every element.
struct UpdateKind {
  Algorithm algorithm = Algorithm::kAdam;
  int flags = kDecoupled;
  bool has_first = true;
  double coef = 1.0;
  bool telemetry = true;

  Loop loop() const { return loop_of(algorithm, flags, has_first); }
  std::vector<double> settings() const {
    return {0.01, 0.9, algorithm == Algorithm::kSgd ? 0.2 : 0.99, 1e-8, 0.1, double(flags)};
  }
};

struct UpdateResult {
  std::vector<double> rows;
  std::vector<float> summary;
};

UpdateResult update(std::vector<Updated>& list, std::vector<int64_t>& ledger, const float* blocked,
                    simt::Random& random, const UpdateKind& kind = {}) {
  const bool is_adam = kind.algorithm == Algorithm::kAdam;
  std::vector<cuda::UpdateTensor> tensors;
  for (size_t i = 0; i < list.size(); ++i) {
    Updated& t = list[i];
    tensors.push_back({t.p.numel() == 0 ? nullptr : t.p.data(), t.g.data(),
                       kind.has_first ? t.m.data() : nullptr, is_adam ? t.v.data() : nullptr,
                       kind.loop() == Loop::kAmsgrad ? t.largest.data() : nullptr,
                       is_adam ? &t.step : nullptr, t.p.numel(), t.p.format(), t.g.format(), false,
                       static_cast<int32_t>(i / 3)});  // more groups than a launch takes
  }
  std::vector<double> settings;
  for (size_t group = 0; group < list.size() / 3 + 1; ++group) {
    for (const double setting : kind.settings()) settings.push_back(setting);
  }
  const std::vector<double> coefs(list.size(), kind.coef);
  const auto count = static_cast<int64_t>(tensors.size());
  UpdateResult result = {std::vector<double>(count * kNumTelemetry, NAN),
                         std::vector<float>(kNumSummary, NAN)};
  std::vector<uint64_t> scratch(cuda::update_scratch_bytes(tensors.data(), count) / 8);
  for (uint64_t& word : scratch) word = random.next();
  const cuda::UpdateCall call = {kind.algorithm,
                                 settings.data(),
                                 count,
                                 ledger.data(),
                                 kind.coef == 1.0 ? nullptr : coefs.data(),
                                 blocked,
                                 0,
                                 {},
                                 nullptr,
                                 0,
                                 kind.telemetry,
                                 result.rows.data(),
                                 result.summary.data()};
  cuda::launch_optim_update(tensors.data(), count, call, scratch.data(), kQueue);
  for (const Updated& t : list) {
    for (const GuardedTensor* tensor : {&t.p, &t.g, &t.m, &t.v, &t.largest}) {
      expect(tensor->guards_are_intact(), "wrote outside a tensor");
    }
  }
  return result;
}

template <typename value_t>
value_t update_one(Loop loop, value_t g, value_t p, value_t& m, value_t& v, value_t& largest,
                   const UpdateScalars<value_t>& s) {
  switch (loop) {
    case Loop::kAdam:
      return adam_update<false>(g, p, m, v, largest, s);
    case Loop::kAmsgrad:
      return adam_update<true>(g, p, m, v, largest, s);
    case Loop::kSgd:
      return sgd_update<Momentum::kNone>(g, p, m, s);
    case Loop::kMomentum:
      return sgd_update<Momentum::kPlain>(g, p, m, s);
    case Loop::kNesterov:
      return sgd_update<Momentum::kNesterov>(g, p, m, s);
    default:
      return lion_update(g, p, m, s);
  }
}

// Returns the sum of squares of what was subtracted.
template <typename value_t>
double update_serially(Updated& t, const UpdateKind& kind = {}) {
  const std::vector<double> settings = kind.settings();
  const bool is_adam = kind.algorithm == Algorithm::kAdam;
  const UpdateScalars<value_t> s =
      scalars_of<value_t>(kind.algorithm, settings.data(), settings[kLr], is_adam ? t.step : 0.0);
  const double coef = (kind.flags & kMaximize) ? -kind.coef : kind.coef;
  const bool is_tiny = std::fabs(coef) < kSmallestNormalFloat;
  double sumsq = 0.0;
  for (int64_t i = 0; i < t.p.numel(); ++i) {
    auto m = static_cast<value_t>(t.m.get(i)), v = static_cast<value_t>(t.v.get(i));
    auto largest = static_cast<value_t>(t.largest.get(i));
    const auto p = static_cast<value_t>(t.p.get(i)), loaded = static_cast<value_t>(t.g.get(i));
    value_t g =
        is_tiny ? static_cast<value_t>(t.g.get(i) * coef) : loaded * static_cast<value_t>(coef);
    if ((kind.flags & kDropNonFinite) && !is_finite(loaded)) g = 0;
    if (!(kind.flags & kDecoupled)) g = g + s.l2 * p;
    const value_t change = update_one(kind.loop(), g, p, m, v, largest, s);
    t.p.set(i, p - change);
    if (kind.has_first) t.m.set(i, m);
    if (is_adam) t.v.set(i, v);
    if (kind.loop() == Loop::kAmsgrad) t.largest.set(i, largest);
    if (is_finite(change)) sumsq += static_cast<double>(change) * static_cast<double>(change);
  }
  t.step += 1.0f;
  return sumsq;
}

double bad_of(const GuardedTensor& tensor) {
  double bad = 0.0;
  for (int64_t i = 0; i < tensor.numel(); ++i) bad += is_finite(tensor.get(i)) ? 0.0 : 1.0;
  return bad;
}

// Every loop, in every pair of formats, with everything that may happen to a gradient.
void check_update_loops(simt::Random& random) {
  const UpdateKind kinds[] = {
      {Algorithm::kAdam, kDecoupled, true, 0.5, true},
      {Algorithm::kAdam, kMaximize | kDropNonFinite, true, 0.5, true},
      {Algorithm::kAdam, kDecoupled | kAmsgrad, true, 1.0, true},
      {Algorithm::kSgd, kDropNonFinite, false, 0.25, true},
      {Algorithm::kSgd, kDecoupled, true, 1e-41, true},
      {Algorithm::kSgd, kNesterov, true, 3.0, true},
      {Algorithm::kLion, kDecoupled, true, 0.5, true},
      {Algorithm::kLion, kDecoupled | kMaximize, true, 0.5, false},
  };
  const Format formats[][2] = {
      {Format::kFloat32, Format::kFloat32},  {Format::kBfloat16, Format::kBfloat16},
      {Format::kFloat16, Format::kFloat16},  {Format::kFloat32, Format::kBfloat16},
      {Format::kBfloat16, Format::kFloat32}, {Format::kFloat16, Format::kFloat32},
      {Format::kFloat32, Format::kFloat16},  {Format::kFloat64, Format::kFloat64},
  };
  for (const UpdateKind& kind : kinds) {
    const uint64_t seed = random.next();
    const auto make = [&] {
      simt::Random same(seed);
      std::vector<Updated> list;
      for (const auto& [param, grad] : formats) {
        const auto add = [&](int64_t numel, const std::array<int64_t, 5>& past) {
          list.emplace_back(param, grad, numel, same, past);
          Updated& t = list.back();
          if (kind.flags & kDropNonFinite) t.g.set(numel - 1, INFINITY);
          if (numel < 9) return;
          t.p.set(0, NAN);
          t.m.set(3, -INFINITY);
          t.v.set(numel - 2, INFINITY);
        };
        add(2, Updated::anywhere(same));
        add(int64_t{4} * cuda::kThreads + 7, {});
        for (int astray = 0; astray < 5; ++astray) {  // one of them alone forbids wide loads
          std::array<int64_t, 5> past = {};
          past[astray] = 1;
          add(9, past);
        }
      }
      return list;
    };
    std::vector<Updated> list = make(), serial = make();
    std::vector<int64_t> ledger(list.size() * kNumLedger, 0);
    const UpdateResult found = update(list, ledger, nullptr, random, kind);
    for (size_t i = 0; i < list.size(); ++i) {
      Updated& t = serial[i];
      const double sumsq = t.p.format() == Format::kFloat64 ? update_serially<double>(t, kind)
                                                            : update_serially<float>(t, kind);
      const std::string place = " of tensor " + std::to_string(i) + ", loop " +
                                std::to_string(static_cast<int>(kind.loop()));
      for (int64_t k = 0; k < t.p.numel(); ++k) {
        const auto same = [&](const GuardedTensor& a, const GuardedTensor& b) {
          return a.get(k) == b.get(k) || (std::isnan(a.get(k)) && std::isnan(b.get(k)));
        };
        expect(same(list[i].p, t.p), "a weight" + place);
        expect(same(list[i].m, t.m) && same(list[i].v, t.v), "a moment" + place);
        expect(same(list[i].largest, t.largest), "a maximum" + place);
      }
      if (!kind.telemetry) {
        expect(ledger[i * kNumLedger + kIsKnown] == 0, "known without telemetry" + place);
        continue;
      }
      const double* row = found.rows.data() + i * kNumTelemetry;
      expect(is_close(row[kUpdateSumSq], sumsq), "updates" + place);
      expect(row[kWeightBad] == bad_of(t.p), "bad weights" + place);
      expect(row[kFirstBad] == (kind.has_first ? bad_of(t.m) : 0.0), "bad firsts" + place);
      expect(row[kSecondBad] == (kind.algorithm == Algorithm::kAdam ? bad_of(t.v) : 0.0),
             "bad seconds" + place);
    }
    const UpdateResult next = update(list, ledger, nullptr, random, kind);
    expect(!kind.telemetry || next.summary[kFirstForeign] == -1.0f, "its own writes are foreign");
  }
}

void check_update(simt::Random& random) {
  const uint64_t seed = random.next();
  const auto make = [&] {
    simt::Random same(seed);
    std::vector<Updated> list;
    const int64_t chunk = cuda::kDeviceChunk, round = 4 * cuda::kThreads;
    for (const Format format :
         {Format::kFloat32, Format::kBfloat16, Format::kFloat16, Format::kFloat64}) {
      for (const int64_t numel :
           {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{4}, int64_t{5}, round - 1, round + 5,
            SIMT_TSAN ? 9 : chunk, SIMT_TSAN ? 10 : chunk + 1}) {
        list.emplace_back(format, numel, same);
      }
    }
    for (int k = 0; k < 12; ++k) list.emplace_back(Format::kFloat32, 7 + k, same);
    list.emplace_back(Format::kBfloat16, 2 * chunk + 5, same);
    return list;
  };
  std::vector<Updated> serial = make();
  for (Updated& t : serial) {
    t.p.format() == Format::kFloat64 ? update_serially<double>(t) : update_serially<float>(t);
  }
  UpdateResult first;
  for (const int64_t multiprocessors : {1, 2, 5}) {
    if (SIMT_TSAN && multiprocessors != 2) continue;
    cuda::emulated_multiprocessors = multiprocessors;
    std::vector<Updated> list = make();
    std::vector<int64_t> ledger(list.size() * kNumLedger, 0);
    const UpdateResult found = update(list, ledger, nullptr, random);
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string place = " of tensor " + std::to_string(i);
      expect(list[i].content() == serial[i].content(), "an update" + place);
      expect(list[i].step == 4.0f, "the step" + place);
      double sumsq = 0.0;
      for (int64_t k = 0; k < list[i].p.numel(); ++k) {
        sumsq += list[i].p.get(k) * list[i].p.get(k);
      }
      expect(is_close(found.rows[i * kNumTelemetry], sumsq), "weights" + place);
      expect(ledger[i * kNumLedger + kUpdates] == 1, "the count of updates" + place);
    }
    if (first.rows.empty()) first = found;
    expect(same_bits(first.rows, found.rows), "another grid, other telemetry");
    expect(same_bits(first.summary, found.summary), "another grid, another summary");
    expect(found.summary[kTaken] == 1.0f && found.summary[kHealthFlags] == 0.0f, "a healthy step");

    const size_t last = list.size() - 1;  // of another launch than the first
    list[last].p.set(0, 5.0);
    list[last].m.set(1, NAN);
    const UpdateResult bad = update(list, ledger, nullptr, random);
    const double* row = bad.rows.data() + last * kNumTelemetry;
    expect(row[kForeign] == kForeignWeight + kForeignFirst, "foreign writes");
    expect(row[kFirstBad] == 1.0 && row[kWeightBad] == 1.0, "bad elements");
    expect(bad.summary[kFirstForeign] == static_cast<float>(last), "the first foreign tensor");
    expect(bad.summary[kFirstBadTensor] == static_cast<float>(last), "the first bad tensor");

    std::vector<std::vector<char>> before;
    for (const Updated& t : list) before.push_back(t.content());
    const float one = 1.0f;
    const UpdateResult skipped = update(list, ledger, &one, random);
    for (size_t i = 0; i < list.size(); ++i) {
      expect(list[i].content() == before[i], "a skipped step wrote");
      expect(list[i].step == 5.0f, "a skipped step counted");
    }
    expect(skipped.summary[kTaken] == 0.0f && skipped.rows[last * kNumTelemetry] == 0.0,
           "what a skipped step reports");
  }
  cuda::emulated_multiprocessors = 2;
}

struct Check {
  const char* name;
  void (*run)(simt::Random&);
};

constexpr Check kChecks[] = {{"stats", check_stats},
                             {"rewriting", check_rewriting},
                             {"rules", check_rules},
                             {"totals", check_totals},
                             {"percentile", check_percentile},
                             {"agc", check_agc},
                             {"fingerprints", check_fingerprints},
                             {"powers", check_powers},
                             {"watch_loss", check_watch_loss},
                             {"splitting", check_splitting},
                             {"update", check_update},
                             {"update_loops", check_update_loops}};

}  // namespace
}  // namespace kernel_check

int main(int argc, char** argv) {
  const uint64_t first = argc > 1 ? strtoull(argv[1], nullptr, 10) : 0;
  const uint64_t seeds = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
  int passed = 0;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    const simt::Order orders[] = {simt::Order::kRandom, simt::Order::kForward,
                                  simt::Order::kReverse, simt::Order::kRandom};
    for (const kernel_check::Check& check : kernel_check::kChecks) {
      if (argc > 3 && std::string(argv[3]) != check.name) continue;
      simt::set_schedule({orders[seed % 4], seed});
      simt::Random random(seed);
      try {
        check.run(random);
        ++passed;
      } catch (const std::exception& error) {
        printf("%s, seed %lu: %s\n", check.name, static_cast<unsigned long>(seed), error.what());
        return 1;
      }
    }
  }
  printf("passed %d\n", passed);
  return passed ? 0 : 3;
}
