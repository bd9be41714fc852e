// Functions of single elements whose native CPU kernel computes the last elements of a range in another way than the
// others, so that an element's bits depend on its place. Host only: a GPU's kernel has one way.
//
//   kSigmoid   1 / (1 + exp(-x))             kSilu   x / (1 + exp(-x))          kRsqrt  1 / sqrt(x)
//   kSoftplus  log(1 + exp(b x)) / b, and x where b x > threshold
//   kGelu      x * (1 + erf(x / sqrt 2)) / 2
//   kGeluTanh  x * (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//
// Arithmetic: float, exp and log of elementary.h, one rounding at the end. NaN in, NaN out.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

enum class PointwiseFunction : uint8_t { kSigmoid, kSilu, kRsqrt, kSoftplus, kGelu, kGeluTanh };

struct Pointwise {
  const void* x;
  void* y;  // may be x
  int64_t count;
  PointwiseFunction function;
  float beta, threshold;  // of kSoftplus
  DType dtype;
};

QUARTZ_CPU_KERNEL(void, pointwise, (const Pointwise& a, const Parallel& parallel), (a, parallel))

}  // namespace quartz::kernels
