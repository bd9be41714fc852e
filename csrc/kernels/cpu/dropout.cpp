#include "kernels/dropout.h"

#include <algorithm>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {

void dropout(const Dropout& a, const Parallel& parallel) {
  constexpr int kGroup = 16;  // blocks at a time: loops that the compiler turns into vectors
  const uint64_t threshold = threshold_of(a.keep);
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(a.x);
    T* result = static_cast<T*>(a.result);
    parallel.run((a.count + 3) / 4, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block += kGroup) {
        PhiloxWords words[kGroup];
        for (int i = 0; i < kGroup; ++i) words[i] = a.source.block(block + i);
        const int64_t first = 4 * block;
        const int64_t count = std::min<int64_t>(4 * std::min<int64_t>(kGroup, end - block), a.count - first);
        for (int64_t i = 0; i < count; ++i) {
          const bool kept = words[i / 4].word[i % 4] < threshold;
          a.mask[first + i] = kept;
          result[first + i] = dropped(x[first + i], kept, a.scale);
        }
      }
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
