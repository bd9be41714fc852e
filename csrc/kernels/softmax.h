// Softmax and its logarithm over rows:  y = exp(x - m) / s  or  (x - m) - log(s),  m the maximum, s the sum of exp(x -
// m).
//
// Order of arithmetic, a function of the row length alone: the sum in the order of kernels/row_reduce.h; the quotient
// is a product with 1 / s; one rounding. A row with NaN or +infinity, or of -infinity only, is NaN throughout.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct Softmax {
  const void* x;  // rows of `width` elements, `x_stride` elements apart
  void* y;        // contiguous
  int64_t rows, width, x_stride;
  bool log;
  DType dtype, y_dtype;
};

QUARTZ_CPU_KERNEL(void, softmax, (const Softmax& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void softmax(const Softmax& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
