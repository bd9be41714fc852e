// result = x * m * scale in float, rounded once, with m the Bernoulli numbers of random_fill.h: m of element i is 1
// where its word is below keep * 2^32. `mask` gets m. Contiguous, and scale is 1 / keep (0 for keep = 0).
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/random_fill.h"

namespace quartz::kernels {

struct Dropout {
  const void* x;
  void* result;
  uint8_t* mask;
  int64_t count;
  DType dtype;
  double keep;
  float scale;
  RandomSource source;
};

// A product with 0, not a choice: infinite and NaN elements become NaN, as in PyTorch.
template <class T>
QUARTZ_HD T dropped(T x, bool kept, float scale) {
  return from_float<T>(product(product(to_float(x), kept ? 1.0f : 0.0f), scale));
}

QUARTZ_CPU_KERNEL(void, dropout, (const Dropout& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void dropout(const Dropout& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
