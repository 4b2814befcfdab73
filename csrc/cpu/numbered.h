// Objects by number, as an operator can name them.

#pragma once

#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace zclip::cpu {

// Who uses an object holds it, so that dropping it meanwhile does no harm.
template <typename T>
class Numbered {
 public:
  int64_t add(std::shared_ptr<T> object) {
    const std::lock_guard<std::mutex> guard(mutex_);
    objects_[++last_] = std::move(object);
    return last_;
  }

  // Returns null if there is none.
  std::shared_ptr<T> find(int64_t number) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = objects_.find(number);
    return found == objects_.end() ? nullptr : found->second;
  }

  void drop(int64_t number) {
    std::shared_ptr<T> last;  // destroyed outside the lock
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = objects_.find(number);
    if (found == objects_.end()) return;
    last = std::move(found->second);
    objects_.erase(found);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<int64_t, std::shared_ptr<T>> objects_;
  int64_t last_ = 0;
};

}  // namespace zclip::cpu
