// Layer norm of the last dimension:  y = (x - mean) * r * weight + bias,  r = 1 / sqrt(mean((x - mean)^2) + eps).
//
// Order of arithmetic, a function of the row length alone. CPU: 16 sums, sum j over the elements j, j + 16, ...
// ascending (the squares with fma), added by the tree i + 8, i + 4, i + 2, i + 1; the mean first, then the squares of
// the differences from it; ((x - mean) * r) * w + b in float, one rounding. CUDA: the same with the sums of
// kernels/cuda/rows.cuh.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct LayerNorm {
  const void* x;       // rows of `width` elements, `x_stride` elements apart
  const void* weight;  // `width` elements of `weight_dtype`, or null for ones
  const void* bias;    // `width` elements of `weight_dtype`, or null for zeros
  void* y;             // contiguous
  float *mean, *rstd;  // one a row, or null
  int64_t rows, width, x_stride;
  float eps;
  DType dtype, weight_dtype;
};

QUARTZ_CPU_KERNEL(void, layer_norm, (const LayerNorm& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void layer_norm(const LayerNorm& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
