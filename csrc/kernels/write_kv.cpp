#include "kernels/write_kv.h"

#include <algorithm>

namespace quartz::kernels {

void write_kv(const WriteKv& a, const Parallel& parallel) {
  const int64_t bytes = size_of(a.dtype);
  // Split by heads: the rows of one slot are written by one thread, in their order.
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, a.tokens * a.size * bytes));
  parallel.run(a.heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t slot = a.slots[t];
      if (slot < 0) continue;
      const char* row = static_cast<const char*>(a.rows) + t * a.row_stride * bytes;
      char* place = static_cast<char*>(a.cache) +
                    (slot / a.block_size * a.block_stride + slot % a.block_size * a.slot_stride) * bytes;
      for (int64_t h = begin; h < end; ++h) {
        memcpy(place + h * a.cache_head_stride * bytes, row + h * a.row_head_stride * bytes,
               static_cast<size_t>(a.size * bytes));
      }
    }
  });
}

}  // namespace quartz::kernels
