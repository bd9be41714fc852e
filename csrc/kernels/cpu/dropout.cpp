#include "kernels/dropout.h"

#include <algorithm>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {

void dropout(const Dropout& a, const Parallel& parallel) {
  constexpr int kGroup = 16;  // blocks at a time: loops over their 64 words that the compiler turns into vectors
  const BernoulliWords ones(a.keep);
  with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    const T* x = static_cast<const T*>(a.x);
    T* result = static_cast<T*>(a.result);
    parallel.run((a.count + 3) / 4, 4096, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block += kGroup) {
        uint32_t words[4 * kGroup];
        a.source.blocks<kGroup>(block, NoiseStream::kFills, words);
        const int64_t first = 4 * block;
        const int64_t count = std::min<int64_t>(4 * std::min<int64_t>(kGroup, end - block), a.count - first);
        const auto drop = [&](int64_t i) {
          const bool kept = ones.has(words[i]);
          a.mask[first + i] = kept;
          result[first + i] = dropped(x[first + i], kept, a.scale);
        };
        if (count == 4 * kGroup) {
          for (int64_t i = 0; i < 4 * kGroup; ++i) drop(i);
        } else {
          for (int64_t i = 0; i < count; ++i) drop(i);
        }
      }
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
