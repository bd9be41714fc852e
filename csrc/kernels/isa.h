// Which instruction set the CPU kernels use. Every file in cpu/ is compiled once for each; the same bits come out of
// all.
#pragma once

#include <cstdint>

namespace quartz::kernels {

// kAvx512Bf16 has the code of kAvx512 and may use vdpbf16ps too.
enum class Isa : uint8_t { kAvx2, kAvx512, kAvx512Bf16 };

const char* name_of(Isa isa);
// What this processor has at most; false if it has not even AVX2 and FMA.
bool detect_isa(Isa* isa);
// The one in use: what the processor has, unless limited.
Isa isa();
// Uses at most `limit` from now on (TORCH_QUARTZ_CPU_ISA, tests).
void limit_isa(Isa limit);

}  // namespace quartz::kernels

// Declares a CPU kernel: `QUARTZ_CPU_KERNEL(void, rms_norm, (const RmsNorm& a, const Parallel& p), (a, p))` declares
// cpu_avx2::rms_norm and cpu_avx512::rms_norm, which cpu/rms_norm.cpp defines, and cpu::rms_norm, which calls the right
// one.
#define QUARTZ_CPU_KERNEL(RESULT, NAME, PARAMETERS, ARGUMENTS)                          \
  namespace cpu_avx2 {                                                                  \
  RESULT NAME PARAMETERS;                                                               \
  }                                                                                     \
  namespace cpu_avx512 {                                                                \
  RESULT NAME PARAMETERS;                                                               \
  }                                                                                     \
  namespace cpu {                                                                       \
  inline RESULT NAME PARAMETERS {                                                       \
    return isa() == Isa::kAvx2 ? cpu_avx2::NAME ARGUMENTS : cpu_avx512::NAME ARGUMENTS; \
  }                                                                                     \
  }
