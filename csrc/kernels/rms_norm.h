// RMS norm of the last dimension, optionally with a residual added first:
//   s = x + residual (rounded to the dtype of x, and written out),  y = s * r * (offset + weight),
//   r = 1 / sqrt(mean(s^2) + eps)
//
// Order of arithmetic, a function of the row length alone. CPU: 16 sums of squares, sum j over the elements j, j + 16,
// ... with fma in ascending order; the 16 are added by the tree i + 8, i + 4, i + 2, i + 1. CUDA: sums of squares with
// fma in the order of kernels/cuda/rows.cuh. Both: then mean, + eps, square root, one division; (s * r) * w in float;
// one rounding at the end. `round_first` rounds s * r to the dtype before the product with the weight, as the modules
// of Llama's family do.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct RmsNorm {
  const void* x;         // rows of `width` elements, `x_stride` elements apart
  const void* residual;  // the same shape, or null
  const void* weight;    // `width` elements of `weight_dtype`, or null for ones
  void* y;               // contiguous
  void* sum;             // contiguous, where residual is given: x + residual
  int64_t rows, width, x_stride, residual_stride;
  float eps, weight_offset;  // 1 for models that store w - 1 (Gemma)
  bool round_first;
  DType dtype, weight_dtype;
};

QUARTZ_CPU_KERNEL(void, rms_norm, (const RmsNorm& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void rms_norm(const RmsNorm& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
