// Command line face of the emulator's own tests: runs one sample kernel, with or without its bug,
// under many schedules. Exit status: 0 all right, 1 a wrong result, 2 the emulator objected; a
// sanitizer ends the process itself. test_simt.py reads the status and the text.
//
//   self_test sums none random 0 100

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "sample_kernels.cuh"

namespace {

using samples::Bug;
using samples::kThreads;
using zclip::cuda::launch;

// Small integers: every order of addition gives the same sum, so results are compared exactly.
std::vector<float> numbers(int64_t count) {
  std::vector<float> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = static_cast<float>(i * 7 % 13 - 5);
  return x;
}

template <Bug bug>
bool run_sums(int64_t numel) {
  const int64_t length = 300;  // not a multiple of the block
  const unsigned blocks = (numel + length - 1) / length;
  const std::vector<float> x = numbers(numel);
  std::vector<double> out(2 * blocks, -1.0), wanted(2 * blocks, 0.0);
  for (int64_t i = 0; i < numel; ++i) {
    wanted[2 * (i / length)] += x[i];
    wanted[2 * (i / length) + 1] += x[i] * x[i];
  }
  launch(samples::sums<bug>, blocks, kThreads, nullptr, x.data(), numel, length, out.data());
  return out == wanted;
}

template <Bug bug>
bool run_warp_rotate(int64_t numel) {
  const unsigned blocks = (numel + kThreads - 1) / kThreads;
  const std::vector<float> x = numbers(blocks * kThreads);
  std::vector<float> out(x.size(), -1.0f), wanted(x.size());
  for (size_t i = 0; i < x.size(); ++i) wanted[i] = x[i / 32 * 32 + (i + 1) % 32];
  launch(samples::warp_rotate<bug>, blocks, kThreads, nullptr, x.data(), out.data());
  return out == wanted;
}

template <Bug bug>
bool run_hand_over(int64_t /*numel*/) {
  const std::vector<float> x = numbers(5);
  std::vector<float> out(x.size(), -1.0f);
  launch(samples::hand_over<bug>, x.size(), kThreads, nullptr, x.data(), out.data());
  return out == x;
}

template <Bug bug>
bool run_copy_vectors(int64_t numel) {
  const int64_t vectors = numel / 4;
  const std::vector<float> x = numbers(4 * vectors + 1);  // room for the bug to read another number
  std::vector<float> out(4 * vectors, -1.0f);
  const std::vector<float> wanted(x.begin(), x.end() - 1);
  launch(samples::copy_vectors<bug>, (vectors + kThreads - 1) / kThreads, kThreads, nullptr,
         x.data(), out.data(), vectors);
  return out == wanted;
}

// Two launches with one ticket: the second must find it as the first did.
template <Bug bug>
bool run_ticket_sum(int64_t numel) {
  const unsigned blocks = 5;
  const std::vector<float> x = numbers(numel);
  double wanted = 0.0;
  for (float v : x) wanted += v;
  unsigned ticket = 0;
  for (int step = 0; step < 2; ++step) {
    std::vector<double> partials(blocks, 1e9);
    double total = -1.0;
    launch(samples::ticket_sum<bug>, blocks, kThreads, nullptr, x.data(), numel, partials.data(),
           &ticket, &total);
    if (total != wanted) return false;
  }
  return ticket == 0;
}

bool run_scale_rows(int64_t /*numel*/) {
  samples::Table table;
  const float source = 0.5f;
  table.source = &source;
  table.scale = 3;
  for (int i = 0; i < table.kRows; ++i) table.rows[i] = i;
  std::vector<double> out(table.kRows, -1.0), wanted(table.kRows);
  for (int i = 0; i < table.kRows; ++i) wanted[i] = 3.0 * i + 0.5;
  launch(samples::scale_rows, (table.kRows + 255) / 256, 256, nullptr, table, out.data(),
         table.kRows);
  return out == wanted;
}

using Run = bool (*)(int64_t numel);
using Key = std::pair<std::string, std::string>;  // kernel, bug

const std::map<Key, Run> kRuns = {
    {{"sums", "none"}, run_sums<Bug::kNone>},
    {{"sums", "missing_syncthreads"}, run_sums<Bug::kMissingSyncthreads>},
    {{"sums", "missing_reuse_barrier"}, run_sums<Bug::kMissingReuseBarrier>},
    {{"sums", "global_off_by_one"}, run_sums<Bug::kGlobalOffByOne>},
    {{"sums", "shared_off_by_one"}, run_sums<Bug::kSharedOffByOne>},
    {{"sums", "shared_read_off_by_one"}, run_sums<Bug::kSharedReadOffByOne>},
    {{"sums", "divergent_shuffle"}, run_sums<Bug::kDivergentShuffle>},
    {{"sums", "divergent_barrier"}, run_sums<Bug::kDivergentBarrier>},
    {{"hand_over", "none"}, run_hand_over<Bug::kNone>},
    {{"hand_over", "read_too_early"}, run_hand_over<Bug::kReadTooEarly>},
    {{"warp_rotate", "none"}, run_warp_rotate<Bug::kNone>},
    {{"warp_rotate", "missing_syncwarp"}, run_warp_rotate<Bug::kMissingSyncwarp>},
    {{"warp_rotate", "shuffle_for_syncwarp"}, run_warp_rotate<Bug::kShuffleForSyncwarp>},
    {{"copy_vectors", "none"}, run_copy_vectors<Bug::kNone>},
    {{"copy_vectors", "misaligned_load"}, run_copy_vectors<Bug::kMisalignedLoad>},
    {{"ticket_sum", "none"}, run_ticket_sum<Bug::kNone>},
    {{"ticket_sum", "missing_release"}, run_ticket_sum<Bug::kMissingRelease>},
    {{"ticket_sum", "early_release"}, run_ticket_sum<Bug::kEarlyRelease>},
    {{"ticket_sum", "missing_acquire"}, run_ticket_sum<Bug::kMissingAcquire>},
    {{"ticket_sum", "missing_last_barrier"}, run_ticket_sum<Bug::kMissingLastBarrier>},
    {{"ticket_sum", "missing_ticket_reset"}, run_ticket_sum<Bug::kMissingTicketReset>},
    {{"ticket_sum", "plain_ticket"}, run_ticket_sum<Bug::kPlainTicket>},
    {{"scale_rows", "none"}, run_scale_rows},
};

const std::map<std::string, simt::Order> kOrders = {{"forward", simt::Order::kForward},
                                                    {"reverse", simt::Order::kReverse},
                                                    {"random", simt::Order::kRandom}};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    fprintf(stderr, "usage: self_test kernel bug order first_seed seeds [numel]\n");
    return 3;
  }
  const Run run = kRuns.at({argv[1], argv[2]});
  const simt::Order order = kOrders.at(argv[3]);
  const uint64_t first_seed = strtoull(argv[4], nullptr, 10);
  const uint64_t seeds = strtoull(argv[5], nullptr, 10);
  const int64_t numel = argc > 6 ? strtoll(argv[6], nullptr, 10) : 1999;
  uint64_t wrong = 0, objections = 0;
  for (uint64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    simt::set_schedule({order, seed});
    try {
      wrong += !run(numel);
    } catch (const std::runtime_error& error) {
      if (objections++ == 0) printf("%s\n", error.what());
    }
  }
  printf("wrong %lu objections %lu of %lu; last: %lu switches in %lu blocks\n",
         static_cast<unsigned long>(wrong), static_cast<unsigned long>(objections),
         static_cast<unsigned long>(seeds), static_cast<unsigned long>(simt::counters.switches),
         static_cast<unsigned long>(simt::counters.blocks));
  return objections ? 2 : wrong ? 1 : 0;
}
