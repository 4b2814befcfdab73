// A CUDA runtime that launches nothing and writes down everything: the host code that nvcc compiled
// runs against it on a machine without a GPU. It has the few functions that a launch needs and no
// others, so that code which waits, copies or allocates does not even link.

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "../csrc/cuda/launchers.h"

namespace {

struct Dim {
  unsigned x, y, z;
};

struct Configuration {
  Dim grid, block;
  size_t shared_bytes;
  void* stream;
};

struct Launch {
  std::string kernel;
  Configuration configuration;
  int32_t first_word;  // of the first argument: the number of tensors in a table
};

constexpr int kMultiprocessors = 132;

std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;  // filled before main() by nvcc's own code
  return names;
}
std::vector<Configuration> configurations;
std::vector<Launch> launches;
int attribute_questions = 0;

// Called with every launch, to look at its arguments while they are there; null if nobody is.
using Hook = void (*)(const char* kernel, unsigned grid, unsigned block, void** arguments);
Hook hook = nullptr;

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  kernel_names()[host_function] = name;
}
unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared_bytes, void* stream) {
  configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}
int __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared_bytes, void* stream) {
  const Configuration top = configurations.back();
  configurations.pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<void**>(stream) = top.stream;
  return 0;
}
int __cudaGetKernel(void** kernel, const void* host_function) {
  *kernel = const_cast<void*>(host_function);
  return 0;
}
int __cudaLaunchKernel(void* kernel, Dim grid, Dim block, void** arguments, size_t shared_bytes,
                       void* stream) {
  launches.push_back({kernel_names()[kernel],
                      {grid, block, shared_bytes, stream},
                      *static_cast<const int32_t*>(arguments[0])});
  if (hook != nullptr) hook(launches.back().kernel.c_str(), grid.x, block.x, arguments);
  return 0;
}
int cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void** arguments, size_t shared_bytes,
                     void* stream) {
  return __cudaLaunchKernel(const_cast<void*>(kernel), grid, block, arguments, shared_bytes,
                            stream);
}
int cudaGetLastError() { return 0; }
const char* cudaGetErrorString(int) { return "no error"; }
int cudaDeviceGetAttribute(int* value, int /*attribute*/, int /*device*/) {
  ++attribute_questions;
  *value = kMultiprocessors;
  return 0;
}

// What the test asks of it.
void fake_on_launch(Hook called) { hook = called; }
void fake_clear() { launches.clear(); }
int fake_launches() { return static_cast<int>(launches.size()); }
int fake_attribute_questions() { return attribute_questions; }
const char* fake_launch(int i) {
  static char line[512];
  const Launch& launch = launches[i];
  snprintf(line, sizeof line, "%s grid=%u block=%u shared=%zu stream=%p tensors=%d",
           launch.kernel.c_str(), launch.configuration.grid.x, launch.configuration.block.x,
           launch.configuration.shared_bytes, launch.configuration.stream, launch.first_word);
  return line;
}

// A whole step, clip_by_global_norm_, of `count` tensors of `numel` elements. No address is ever
// followed.
int fake_clip(int64_t count, int64_t numel, void* stream) {
  using namespace zclip;
  void* somewhere = reinterpret_cast<void*>(uintptr_t{1} << 40);
  const std::vector<cuda::DeviceTensor> grads(count, {somewhere, numel, 1, Format::kBfloat16});
  cuda::Rule rule = {};
  rule.id = RuleId::kGlobalNorm;
  rule.settings[0] = 1.0;
  const cuda::Queue queue = {stream, 0};
  if (int error = cuda::launch_grad_stats(grads.data(), count, somewhere,
                                          static_cast<GradStats*>(somewhere), &rule, {}, queue)) {
    return error;
  }
  return cuda::launch_scale(grads.data(), count, static_cast<double*>(somewhere), nullptr, queue);
}

}  // extern "C"
