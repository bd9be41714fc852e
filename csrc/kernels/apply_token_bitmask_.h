// logits[row, id] = -inf where bit id % 32 of word id / 32 of the row's bitmask is 0; all else stays as it is, NaN too.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct ApplyTokenBitmask {
  void* logits;  // rows of `vocabulary` elements, `stride` elements apart
  DType dtype;
  int64_t rows, vocabulary, stride;
  const int32_t* bitmask;  // `masks` rows of `words`, of at least vocabulary bits, contiguous
  const int64_t*
      row_indices;  // the row of logits of each row of the bitmask, ones outside are passed over; null: its own
  int64_t masks, words;
};

QUARTZ_HD int64_t masked_row(const ApplyTokenBitmask& a, int64_t mask) {
  const int64_t row = a.row_indices != nullptr ? a.row_indices[mask] : mask;
  return row >= 0 && row < a.rows ? row : -1;
}

QUARTZ_CPU_KERNEL(void, apply_token_bitmask_, (const ApplyTokenBitmask& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void apply_token_bitmask_(const ApplyTokenBitmask& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
