// Rotary position embedding: pairs (a, b) of a head's first `rotated` elements become
//   a' = a * cos_a - b * sin_a,   b' = b * cos_b + a * sin_b,
// the elements behind them are copied. `inverse` is the transposed map (a' = a * cos_a + b * sin_b, b' = b * cos_b -
// a * sin_a), which undoes the rotation and is its backward pass.
//
// Where a pair lies: elements i and i + rotated / 2 (halves), or 2i and 2i + 1 (interleaved); input and output choose
// separately. cos_a and cos_b are elements i and i + rotated / 2 of the position's row of `cos`, or 2i and 2i + 1
// (`table_interleaved`), or both element i of a row of rotated / 2 (`table_half`).
//
// Arithmetic: no sums beyond the pair. Where the table has the dtype of x, each product and the sum are rounded to it,
// as PyTorch's own operators do one by one; with a float32 table all is computed in float and rounded once.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

// A tensor [batch, positions, heads, head size], last dimension contiguous; strides in elements.
struct RotaryTensor {
  const void* x;  // null: there is none
  void* y;
  int64_t heads;
  int64_t x_stride[3], y_stride[3];
};

struct Rotary {
  RotaryTensor tensors[2];  // q and k
  const void *cos, *sin;    // [batch, positions, table width], last dimension contiguous
  int64_t cos_stride[2], sin_stride[2];
  int64_t batch, positions, head_size, rotated;
  bool in_interleaved, out_interleaved, table_interleaved, table_half, inverse;
  DType dtype, table_dtype;
};

QUARTZ_CPU_KERNEL(void, rotary, (const Rotary& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void rotary(const Rotary& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
