// A parameter list with its optimizer state, looked into once and then only checked: whether every
// tensor is still where it was. Handing over a list of tensors costs more than updating small ones.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "../math/optim.h"
#include "tensor_list.h"
#include "update_chunk.h"

namespace zclip::cpu {

// What of an optimizer's state an update reads and writes. Each list has one entry per parameter,
// or none at all; an empty tensor stands for what a parameter does not have.
struct OptimState {
  std::vector<Tensor> firsts;
  std::vector<Tensor> seconds;
  std::vector<Tensor> maxima;
  std::vector<Tensor> steps;
};

// The numbers of one step.
struct StepNumbers {
  const double* coefs;  // one per parameter, or null if all are 1
  double grad_scale;    // the gradients are so many times too large
  const double* rates;  // one per group, or null: those of the settings
  const double* settings;
  uint64_t seed;
};

class UpdatePlan {
 public:
  // Raises if a tensor cannot be served; `op` names the place in the message.
  UpdatePlan(Algorithm algorithm, std::vector<Tensor> params, OptimState state, Tensor ledger,
             std::vector<int64_t> sizes, bool telemetry, const char* op);
  ~UpdatePlan();  // where Row and Scalars are known

  // Whether all tensors are where they were.
  bool is_current() const;

  int64_t count() const { return static_cast<int64_t>(params_.size()); }
  bool telemetry() const { return telemetry_; }
  int64_t num_groups() const { return static_cast<int64_t>(sizes_.size()); }

  // Raises if a gradient does not lie in memory as its parameter does. An empty one is none: its
  // parameter is left alone.
  void check_gradients(const TensorList& grads, const char* op) const;

  // Writes parameters, state and ledger. Fills telemetry [count, kNumTelemetry] and summary.
  void update(const TensorList& grads, const StepNumbers& numbers, double* telemetry,
              float* summary);

 private:
  struct Row;  // of one tensor
  struct Scalars;

  // Where the state of one parameter lies; null for what it does not have. Looked up once: asking
  // a tensor for its address costs more than updating a small one.
  struct Entry {
    char* first;
    char* second;
    char* maximum;
    void* step;
    bool step_is_double;
  };

  // Tensors that have memory, as torch knows them, and where it was. Handles, not Tensors: one jump
  // through memory less for each of forty thousand.
  struct Watched {
    AtenTensorHandle handle;
    const void* address;
  };

  bool are_current(int64_t begin, int64_t end) const;  // the parameters in this range
  void fill_rows(const TensorList& grads, const StepNumbers& numbers);
  void close(const TensorList& grads, double* telemetry, float* summary);

  Algorithm algorithm_;
  std::vector<Tensor> params_;
  OptimState state_;
  Tensor ledger_;
  std::vector<int64_t> sizes_;
  bool telemetry_;
  bool is_cached_;  // what a step reads and writes fits the caches
  TensorList list_;
  std::vector<Entry> entries_;
  std::vector<torch::headeronly::ScalarType> dtypes_;
  std::vector<std::vector<int64_t>> strides_;  // of parameters that are not contiguous
  std::vector<Watched> watched_;               // each parameter, followed by its state
  std::vector<int64_t> first_watched_;         // of each parameter in that list, with the end last
  std::vector<Row> rows_;                      // these three are filled in every step
  std::vector<Scalars> scalars_;
  std::vector<UpdateSlot> slots_;
};

// What a skipped step reports.
void report_skipped(int64_t count, double* telemetry, float* summary);

}  // namespace zclip::cpu
