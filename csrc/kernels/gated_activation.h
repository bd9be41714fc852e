// The gated activation of MLPs: y = act(gate) * up, element by element.
//
//   kSilu        g / (1 + exp(-g))
//   kGelu        g * (1 + erf(g / sqrt 2)) / 2
//   kGeluTanh    g * (1 + tanh(sqrt(2 / pi) (g + 0.044715 g^3))) / 2
//   kRelu        max(g, 0)
//   kReluSquared max(g, 0)^2
//   kClampedSwiglu (gpt-oss)  g <- min(g, limit), u <- min(max(u, -limit), limit), y = (u + 1) * g / (1 + exp(-alpha
//   g))
//
// Arithmetic: float; one rounding at the end. `round_first` rounds act(gate) (clamped: each step) to the dtype before
// the product, as modules that compute step by step do. NaN in, NaN out.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

enum class GluActivation : uint8_t { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared, kClampedSwiglu };

struct GatedActivation {
  const void *gate, *up;  // rows of `width` elements; interleaved: gate at 2j and up at 2j + 1 of `gate`
  void* y;                // contiguous
  int64_t rows, width, gate_stride, up_stride;
  GluActivation activation;
  bool interleaved, round_first;
  float alpha, limit;
  DType dtype;
};

QUARTZ_CPU_KERNEL(void, gated_activation, (const GatedActivation& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void gated_activation(const GatedActivation& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
