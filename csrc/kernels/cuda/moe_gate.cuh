// What happens to the sums of the first product: bias, limits, activation, product with the other half.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/moe_cuda.h"

namespace quartz::kernels::cuda {

struct GateRule {
  GateActivation activation;
  float alpha, limit, up_offset;
  bool plain;  // kSilu without alpha, limit and offset
};

QUARTZ_DEVICE float min_or_nan(float a, float b) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
  return least;
}
QUARTZ_DEVICE float max_or_nan(float a, float b) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
  return most;
}
// v / (1 + 2^scaled) by the chip's approximations, the same bits everywhere on it. Six instructions: a tile has some
// hundred of them a lane in straight code, and fetching instructions is what would cost.
QUARTZ_DEVICE float over_one_plus_exp2(float v, float scaled) {
  float power, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(scaled));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
  return v * inverse;
}

enum class GateKind { kPlain, kSilu, kGeluTanh, kRelu };

constexpr float kMinusLog2E = -0x1.715476p+0f;

// NaN stays.
template <GateKind kKind>
QUARTZ_DEVICE float gate(const GateRule& rule, float gate, float up) {
  if constexpr (kKind == GateKind::kPlain) return over_one_plus_exp2(gate, kMinusLog2E * gate) * up;
  const float v = min_or_nan(gate, rule.limit);
  const float u = max_or_nan(min_or_nan(up, rule.limit), -rule.limit) + rule.up_offset;
  if constexpr (kKind == GateKind::kRelu) return max_or_nan(v, 0.0f) * u;
  if constexpr (kKind == GateKind::kSilu) return over_one_plus_exp2(v, kMinusLog2E * rule.alpha * v) * u;
  const float inner = 0x1.988454p+0f * __fmaf_rn(0.044715f, v * v * v, v);
  return over_one_plus_exp2(v, kMinusLog2E * inner) * u;
}

}  // namespace quartz::kernels::cuda
