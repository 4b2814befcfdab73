#include "cpu_path.h"

#include <torch/headeronly/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace zclip::cpu {
namespace {

bool machine_has_avx2() {
#if ZCLIP_HAS_AVX2
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
#else
  return false;
#endif
}

}  // namespace

bool use_avx2() {
  // Read at every call, about 50 ns, so that a test can force either path in one process.
  const char* wanted = std::getenv("ZCLIP_CPU");
  if (wanted == nullptr || std::strcmp(wanted, "auto") == 0) return machine_has_avx2();
  if (std::strcmp(wanted, "portable") == 0) return false;
  STD_TORCH_CHECK(std::strcmp(wanted, "avx2") == 0,
                  "ZCLIP_CPU: expected auto, avx2 or portable, got '", wanted, "'");
  STD_TORCH_CHECK(machine_has_avx2(),
                  "ZCLIP_CPU=avx2: expected a machine with AVX2 and F16C, got none; use auto");
  return true;
}

bool use_avx512() {
#if ZCLIP_HAS_AVX512
  static const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  const char* wanted = std::getenv("ZCLIP_CPU");
  return has && use_avx2() && (wanted == nullptr || std::strcmp(wanted, "auto") == 0);
#else
  return false;
#endif
}

}  // namespace zclip::cpu
