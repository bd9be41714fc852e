// Reductions of rows to one value each.
//
// Order of arithmetic, a function of the row length alone. CPU: 64 sums, sum j over the elements j, j + 64, ...
// ascending; after every 128 additions (8192 elements) they are added to 64 totals and begin again at zero; the totals
// are added by the tree i + 32, i + 16, i + 8, i + 4, i + 2, i + 1. CUDA: kernels/cuda/rows.cuh. In float; variances
// take the mean first, then the squares of the differences from it (fma); logsumexp takes the maximum first. argmax and
// argmin: NaN is above (below) every number, equal values go to the lower index, -0 equals 0.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

enum class Reduction : uint8_t { kSum, kMean, kVar, kStd, kLogSumExp, kArgMax, kArgMin };

struct RowReduce {
  const void* x;  // rows of `width` elements, `x_stride` elements apart; width below 2^32 for argmax and argmin
  void* y;        // one value a row, contiguous: y_dtype, or int64 for argmax and argmin
  int64_t rows, width, x_stride;
  double correction;  // of kVar and kStd: divided by max(0, width - correction)
  Reduction reduction;
  DType dtype, y_dtype;
};

QUARTZ_CPU_KERNEL(void, row_reduce, (const RowReduce& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void row_reduce(const RowReduce& a, void* stream);
}  // namespace cuda
#endif

// A float as an unsigned integer of the same order, with -0 equal to 0 and every NaN above infinity.
QUARTZ_HD uint32_t ordered_bits(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0xffffffffu;
  if ((bits & 0x7fffffffu) == 0) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace quartz::kernels
