// What every pybind11 module of kernels under test shares: how Python chooses the schedule and
// reads the counters. Tensors cross as t.data_ptr() and t.numel(), so no torch header is compiled.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "simt.h"

namespace simt {

// An address that Python got from data_ptr().
template <typename T>
T* at_address(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline Order order_named(const std::string& name) {
  if (name == "forward") return Order::kForward;
  if (name == "reverse") return Order::kReverse;
  if (name == "random") return Order::kRandom;
  throw std::invalid_argument("simt: order is forward, reverse or random, not " + name);
}

inline void bind_schedule(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "set_schedule",
      [](const std::string& order, uint64_t seed, unsigned resident) {
        set_schedule({order_named(order), seed, resident});
      },
      py::arg("order"), py::arg("seed") = 0, py::arg("resident") = Schedule{}.resident);
  module.def("counters", [] {
    py::dict since_set_schedule;
    since_set_schedule["launches"] = counters.launches;
    since_set_schedule["blocks"] = counters.blocks;
    since_set_schedule["switches"] = counters.switches;
    return since_set_schedule;
  });
}

}  // namespace simt
