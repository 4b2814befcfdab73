// A ring of the last values, kept in columns of a rule's state.

#pragma once

#include <cstdint>

#include "hd.h"

namespace zclip {

struct Ring {
  double* values;
  int64_t size;
  double* seen;  // how many were ever pushed; number k stands at place k % size
};

ZCLIP_HD int64_t filled(const Ring& ring) {
  const auto seen = static_cast<int64_t>(*ring.seen);
  return seen < ring.size ? seen : ring.size;
}

// Writes over the oldest value.
ZCLIP_HD void push(const Ring& ring, double value) {
  ring.values[static_cast<int64_t>(*ring.seen) % ring.size] = value;
  *ring.seen += 1.0;
}

}  // namespace zclip
