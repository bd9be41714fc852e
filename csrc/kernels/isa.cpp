#include "kernels/isa.h"

#include <atomic>

namespace quartz::kernels {
namespace {

Isa detected() {
  Isa found = Isa::kAvx2;
  detect_isa(&found);
  return found;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{detected()};
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    default:
      return "avx512_bf16";
  }
}

bool detect_isa(Isa* isa) {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
  *isa = Isa::kAvx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    *isa = __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
  return true;
}

Isa isa() { return current().load(std::memory_order_relaxed); }

void limit_isa(Isa limit) {
  const Isa most = detected();
  current().store(limit < most ? limit : most, std::memory_order_relaxed);
}

}  // namespace quartz::kernels
