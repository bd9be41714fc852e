// Cumulative sums of rows: y[i] = x[0] + ... + x[i].
//
// Order of arithmetic: a function of the position in the row alone, so a prefix of a row has the same bits in any row.
// CPU: one chain in ascending order, in double for float32 and in float for the 16-bit types. CUDA: in float, tiles of
// 256 threads x 16 bytes from position 0: each thread's own elements ascending, threads of a warp by the doubling scan,
// warps and tiles ascending. One rounding an element.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct CumSum {
  const void* x;  // rows of `width` elements, `x_stride` elements apart
  void* y;        // contiguous
  int64_t rows, width, x_stride;
  DType dtype, y_dtype;
};

QUARTZ_CPU_KERNEL(void, cumsum, (const CumSum& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void cumsum(const CumSum& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
