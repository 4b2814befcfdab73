#include "reading.h"

#include <torch/headeronly/util/Exception.h>

#include <algorithm>

#include "numbered.h"

// What is used of Python's stable ABI, so that a build needs no headers of Python. Weak, so that
// the library also loads where a process hides these names; nothing is read then.
#if defined(__APPLE__)
#define ZCLIP_IF_PRESENT __attribute__((weak_import))
#else
#define ZCLIP_IF_PRESENT __attribute__((weak))
#endif
extern "C" {
ZCLIP_IF_PRESENT PyObject* PyList_GetItem(PyObject* list, intptr_t index);  // borrowed
ZCLIP_IF_PRESENT PyObject* PyList_New(intptr_t size);
ZCLIP_IF_PRESENT int PyList_SetItem(PyObject* list, intptr_t index, PyObject* item);  // steals
ZCLIP_IF_PRESENT intptr_t PyList_Size(PyObject* list);
ZCLIP_IF_PRESENT PyObject* PyObject_GetAttr(PyObject* object, PyObject* name);
ZCLIP_IF_PRESENT PyObject* PyObject_Type(PyObject* object);
ZCLIP_IF_PRESENT PyObject* PyObject_CallMethodObjArgs(PyObject* object, PyObject* name, ...);
ZCLIP_IF_PRESENT void* PyCapsule_GetPointer(PyObject* capsule, const char* name);
ZCLIP_IF_PRESENT void PyErr_Clear();
ZCLIP_IF_PRESENT void Py_DecRef(PyObject* object);
}

namespace zclip::cpu {
namespace {

// DLPack 1.x, as far as it is used; https://dmlc.github.io/dlpack/latest/c_api.html
struct DlTensor {
  char* data;
  int32_t device_type;
  int32_t device_id;
  int32_t dim;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  int64_t* sizes;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DlExchange {
  uint32_t major;
  uint32_t minor;
  void* older;
  void* unused[3];
  int (*tensor_of)(void* object, DlTensor* tensor);  // borrows; -1 and an exception if it cannot
  void* current_stream;
};

constexpr int32_t kCpu = 1;
constexpr uint8_t kFloat = 2, kBfloat = 4;
constexpr int64_t kSerials = 1 << 20;  // readings per reader, before numbers come again

// Objects of Python that zclip/reading.py keeps alive.
struct Python {
  int (*tensor_of)(void* object, DlTensor* tensor);
  PyObject* tensor_type;
  PyObject* parameter_type;
  PyObject* none;
  PyObject* grad;
  PyObject* is_neg;
  PyObject* no;
  bool knows_layout;  // of what it only fetches in advance
} python;

Numbered<Reader>& readers() {
  static auto* const kept = new Numbered<Reader>;
  return *kept;
}

bool find_format(uint8_t code, uint8_t bits, Format* format) {
  if (code == kBfloat && bits == 16) {
    *format = Format::kBfloat16;
  } else if (code == kFloat && (bits == 16 || bits == 32 || bits == 64)) {
    *format = bits == 16 ? Format::kFloat16 : bits == 32 ? Format::kFloat32 : Format::kFloat64;
  } else {
    return false;
  }
  return true;
}

PyObject* type_of(PyObject* object) {
  PyObject* type = PyObject_Type(object);
  Py_DecRef(type);  // the object holds it
  return type;
}

// Most of the time goes by waiting for memory: a tensor's object points to the tensor, and that to
// its storage and its gradient. So both loops fetch ahead what the next entries point to. Nothing
// but that depends on where these pointers stand, and start_reading has made sure of the first.
constexpr size_t kTensorAt = 16, kStorageAt = 16, kGradientAt = 24;
constexpr intptr_t kFar = 24, kNear = 12;  // entries ahead

const char* pointer_at(const void* object, size_t offset) {
  return *reinterpret_cast<const char* const*>(static_cast<const char*>(object) + offset);
}

void fetch_ahead(PyObject* list, intptr_t i, intptr_t count, PyObject* type, size_t next) {
  if (!python.knows_layout) return;
  if (i + 2 * kNear + kFar < count) {
    __builtin_prefetch(PyList_GetItem(list, i + kFar + 2 * kNear));
  }
  const auto tensor_of = [&](intptr_t ahead) -> const char* {
    PyObject* object = i + ahead < count ? PyList_GetItem(list, i + ahead) : nullptr;
    return object != nullptr && type_of(object) == type ? pointer_at(object, kTensorAt) : nullptr;
  };
  if (const char* tensor = tensor_of(kFar)) {
    for (int line = 0; line < 3; ++line) __builtin_prefetch(tensor + line * 64);
  }
  if (const char* tensor = tensor_of(kNear)) __builtin_prefetch(pointer_at(tensor, next));
}

// A tensor may stand for the negative of what its memory holds: the imaginary part of a conjugate.
// Its strides are even, so that it is not dense, unless it has one element.
bool is_negative(PyObject* tensor) {
  PyObject* answer = PyObject_CallMethodObjArgs(tensor, python.is_neg, nullptr);
  if (answer == nullptr) {
    PyErr_Clear();
    return true;
  }
  Py_DecRef(answer);
  return answer != python.no;
}

// Asks a tensor; false if it is not one that a kernel may read and write where it lies.
bool look_at(PyObject* object, DlTensor* tensor) {
  if (type_of(object) != python.tensor_type) return false;
  if (python.tensor_of(object, tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  tensor->data += tensor->byte_offset;
  return tensor->device_type == kCpu && tensor->lanes == 1;
}

bool is_contiguous(const DlTensor& tensor) {
  int64_t inside = 1;
  for (int32_t d = tensor.dim - 1; d >= 0; --d) {
    if (tensor.sizes[d] == 1) continue;
    if (tensor.strides[d] != inside) return false;
    inside *= tensor.sizes[d];
  }
  return true;
}

}  // namespace

int64_t Reader::read(PyObject* list, bool may_lack) {
  const std::lock_guard<std::mutex> guard(mutex_);
  is_fresh_ = false;
  const auto count = static_cast<int64_t>(PyList_Size(list));
  if (count <= 0 || has_twins(list)) return 0;
  const bool is_used = list_.use_count() > 1;  // by a call on another thread
  const bool has_known = list_ != nullptr && static_cast<int64_t>(known_.size()) == count;
  if (is_used || !has_known || !same_layouts(list)) {
    if (!learn(list, count, may_lack)) {
      list_ = nullptr;
      return 0;
    }
  }
  is_fresh_ = true;
  return last_ = last_ % (kSerials - 1) + 1;
}

// Moves the list to where its tensors are now; false if one lies differently.
bool Reader::same_layouts(PyObject* list) {
  for (size_t i = 0; i < known_.size(); ++i) {
    const auto at = static_cast<intptr_t>(i);
    fetch_ahead(list, at, static_cast<intptr_t>(known_.size()), python.tensor_type, kStorageAt);
    PyObject* object = PyList_GetItem(list, at);
    const Known& known = known_[i];
    if (known.lacks != (object == python.none)) return false;
    if (known.lacks) continue;
    DlTensor now;
    if (!look_at(object, &now)) return false;
    if (now.code != known.code || now.bits != known.bits || now.dim != known.dim) return false;
    const int64_t* dims = dims_->data() + known.dims;
    for (int32_t d = 0; d < now.dim; ++d) {
      if (now.sizes[d] != dims[d] || now.strides[d] != dims[now.dim + d]) return false;
    }
    if (now.data == nullptr && known.numel > 0) return false;
    if (known.numel == 1 && is_negative(object)) return false;
    list_->move(i, now.data);
  }
  return true;
}

bool Reader::learn(PyObject* list, int64_t count, bool may_lack) {
  known_.clear();
  dims_ = std::make_shared<std::vector<int64_t>>();
  std::vector<Span> spans(count);
  bool has_any = false;
  for (int64_t i = 0; i < count; ++i) {
    PyObject* object = PyList_GetItem(list, i);
    Span& span = spans[i];
    span = {nullptr, 0, Format::kFloat32, true, 0, nullptr, nullptr, i, 1};
    known_.push_back({object == python.none, 0, 0, 0, 0, dims_->size()});
    if (object == python.none) {
      if (!may_lack) return false;
      continue;
    }
    DlTensor now;
    if (!look_at(object, &now) || !find_format(now.code, now.bits, &span.format)) return false;
    has_any = true;
    span.data = now.data;
    span.numel = 1;
    for (int32_t d = 0; d < now.dim; ++d) span.numel *= now.sizes[d];
    if (now.data == nullptr && span.numel > 0) return false;
    if (span.numel == 1 && is_negative(object)) return false;
    Known& known = known_.back();
    known.code = now.code;
    known.bits = now.bits;
    known.dim = now.dim;
    known.numel = span.numel;
    dims_->insert(dims_->end(), now.sizes, now.sizes + now.dim);
    dims_->insert(dims_->end(), now.strides, now.strides + now.dim);
    if (span.numel == 0 || is_contiguous(now)) continue;
    if (!layout_of(now.dim, now.sizes, now.strides).dense) return false;
    span.dim = now.dim;
  }
  if (!has_any) return false;
  for (int64_t i = 0; i < count; ++i) {  // where the vector is now, it stays
    if (spans[i].dim == 0) continue;
    spans[i].sizes = dims_->data() + known_[i].dims;
    spans[i].strides = spans[i].sizes + spans[i].dim;
  }
  list_ = std::make_shared<TensorList>(std::move(spans), dims_);
  return true;
}

// Whether an object comes twice, as a gradient that two parameters share does.
bool Reader::has_twins(PyObject* list) {
  const auto count = static_cast<size_t>(PyList_Size(list));
  size_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  seen_.assign(slots, nullptr);
  for (size_t i = 0; i < count; ++i) {
    PyObject* object = PyList_GetItem(list, static_cast<intptr_t>(i));
    if (object == python.none) continue;
    size_t at = reinterpret_cast<uintptr_t>(object) * 0x9E3779B97F4A7C15ull >> 24;
    while (seen_[at %= slots] != nullptr) {
      if (seen_[at] == object) return true;
      ++at;
    }
    seen_[at] = object;
  }
  return false;
}

std::shared_ptr<const TensorList> Reader::take(int64_t reading, const char* op) {
  const std::lock_guard<std::mutex> guard(mutex_);
  STD_TORCH_CHECK(is_fresh_ && reading % kSerials == last_, "zclip::", op,
                  ": reading: expected the newest of its reader, not used before, got ", reading);
  is_fresh_ = false;
  return list_;
}

std::shared_ptr<const TensorList> take_reading(int64_t reading, const char* op) {
  const std::shared_ptr<Reader> reader = readers().find(reading / kSerials);
  STD_TORCH_CHECK(reader != nullptr, "zclip::", op,
                  ": reading: expected one of zclip.reading, got ", reading);
  return reader->take(reading, op);
}

}  // namespace zclip::cpu

// For zclip/reading.py, by ctypes, with the GIL held.
#define ZCLIP_FOR_PYTHON __attribute__((visibility("default")))
extern "C" {

// The objects are kept by the caller, for good; `address` is that of the tensor behind the object
// `sample`. Returns 0 if lists cannot be read.
ZCLIP_FOR_PYTHON int zclip_start_reading(PyObject* exchange, PyObject* tensor_type,
                                         PyObject* parameter_type, PyObject* none, PyObject* grad,
                                         PyObject* is_neg, PyObject* no, PyObject* sample,
                                         int64_t address) {
  using zclip::cpu::python;
  if (PyList_GetItem == nullptr || PyCapsule_GetPointer == nullptr) return 0;
  const auto* table = static_cast<const zclip::cpu::DlExchange*>(
      PyCapsule_GetPointer(exchange, "dlpack_exchange_api"));
  if (table == nullptr) {
    PyErr_Clear();
    return 0;
  }
  if (table->major != 1 || table->tensor_of == nullptr) return 0;
  const char* found = zclip::cpu::pointer_at(sample, zclip::cpu::kTensorAt);
  const bool knows_layout = reinterpret_cast<intptr_t>(found) == static_cast<intptr_t>(address);
  python = {table->tensor_of, tensor_type, parameter_type, none, grad, is_neg, no, knows_layout};
  return 1;
}

// Returns a new list with the `grad` of each; null, and an exception is set, if one has none.
ZCLIP_FOR_PYTHON PyObject* zclip_gradients(PyObject* params) {
  using zclip::cpu::python;
  const intptr_t count = PyList_Size(params);
  PyObject* list = PyList_New(count);
  for (intptr_t i = 0; list != nullptr && i < count; ++i) {
    zclip::cpu::fetch_ahead(params, i, count, python.parameter_type, zclip::cpu::kGradientAt);
    PyObject* grad = PyObject_GetAttr(PyList_GetItem(params, i), python.grad);
    if (grad == nullptr) {
      Py_DecRef(list);
      return nullptr;
    }
    PyList_SetItem(list, i, grad);
  }
  return list;
}

ZCLIP_FOR_PYTHON int64_t zclip_new_reader() {
  return zclip::cpu::readers().add(std::make_shared<zclip::cpu::Reader>());
}

ZCLIP_FOR_PYTHON void zclip_drop_reader(int64_t reader) { zclip::cpu::readers().drop(reader); }

ZCLIP_FOR_PYTHON int64_t zclip_read(int64_t reader, PyObject* list, int may_lack) {
  const auto found = zclip::cpu::readers().find(reader);
  const int64_t serial = found == nullptr ? 0 : found->read(list, may_lack != 0);
  return serial == 0 ? 0 : reader * zclip::cpu::kSerials + serial;
}

// Whether two lists hold the same objects.
ZCLIP_FOR_PYTHON bool zclip_are_same(PyObject* one, PyObject* other) {
  const intptr_t size = PyList_Size(one);
  if (PyList_Size(other) != size) return false;
  for (intptr_t i = 0; i < size; ++i) {
    if (PyList_GetItem(one, i) != PyList_GetItem(other, i)) return false;
  }
  return true;
}
}
