// The k largest (smallest) elements of rows, in descending (ascending) order; NaN is above every number, equal values
// are in ascending order of index (-0 equals 0). Values keep their bits.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/row_reduce.h"

namespace quartz::kernels {

constexpr int64_t kTopKOnGpu = 2048;  // the largest k of cuda::topk

struct TopK {
  const void* x;                     // rows of `width` < 2^32 elements, `x_stride` elements apart
  void* values;                      // [rows, k], contiguous
  int64_t* indices;                  // [rows, k], contiguous
  int64_t rows, width, x_stride, k;  // 1 <= k <= width
  bool largest;
  DType dtype;
};

QUARTZ_CPU_KERNEL(void, topk, (const TopK& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void topk(const TopK& a, void* stream);
}  // namespace cuda
#endif

// Ascending order of these keys is the order of the result.
QUARTZ_HD uint64_t topk_key(float value, int64_t index, bool largest) {
  const uint32_t order = ordered_bits(value);
  return (static_cast<uint64_t>(largest ? ~order : order) << 32) | static_cast<uint32_t>(index);
}

}  // namespace quartz::kernels
