// Where the tensors of a Python list lie, asked without the dispatcher: torch's DLPack exchange
// functions answer for each in some 20 ns, a tenth of what it takes to hand it to an operator.

#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tensor_list.h"

struct PyObject;

namespace zclip::cpu {

// Reads one list after another, usually of the same layouts: then only addresses change.
class Reader {
 public:
  // With the GIL held. Returns a number for the one operator that may use the reading, while the
  // caller keeps the list; or 0 if an entry is not plain dense memory on the CPU, comes twice, or
  // is None where it must not be. Operators that take lists then serve it, or say what is wrong.
  int64_t read(PyObject* list, bool may_lack);

  // Returns what was read. Raises if it was used before, or something else was read since.
  std::shared_ptr<const TensorList> take(int64_t reading, const char* op);

 private:
  struct Known {  // of one tensor, from the reading before
    bool lacks;
    uint8_t code, bits;
    int32_t dim;
    int64_t numel;
    size_t dims;  // where in dims_ its sizes stand, followed by its strides
  };

  bool same_layouts(PyObject* list);
  bool learn(PyObject* list, int64_t count, bool may_lack);
  bool has_twins(PyObject* list);

  std::mutex mutex_;
  std::vector<Known> known_;
  std::shared_ptr<std::vector<int64_t>> dims_;  // lists point into it
  std::shared_ptr<TensorList> list_;
  std::vector<PyObject*> seen_;
  int64_t last_ = 0;
  bool is_fresh_ = false;
};

// What the reader of this number has read.
std::shared_ptr<const TensorList> take_reading(int64_t reading, const char* op);

}  // namespace zclip::cpu
