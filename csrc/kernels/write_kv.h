// Writes rows of keys or values into a cache of blocks: row t goes to slot slots[t], that is to place
// slots[t] % block_size of block slots[t] / block_size. Negative slots are skipped; of equal slots the last row stays.
#pragma once

#include <cstring>

#include "kernels/attention.h"
#include "kernels/dtype.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct WriteKv {
  DType dtype;
  int64_t tokens, heads, size;  // elements of a head
  const void* rows;
  void* cache;
  int64_t row_stride, row_head_stride;  // in elements, like all strides; the last dimension is contiguous
  int64_t block_size, block_stride, slot_stride, cache_head_stride;
  Indices slots;
};

// A copy: the same on every instruction set.
void write_kv(const WriteKv& a, const Parallel& parallel);

}  // namespace quartz::kernels
