#include "kernels/apply_token_bitmask_.h"

#include <algorithm>

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T>
void masks(const ApplyTokenBitmask& a, T lowest, int64_t begin, int64_t end) {
  for (int64_t mask = begin; mask < end; ++mask) {
    const int64_t row = masked_row(a, mask);
    if (row < 0) continue;
    T* logits = static_cast<T*>(a.logits) + row * a.stride;
    for (int64_t id = 0; id < a.vocabulary; id += 32) {
      const auto bits = static_cast<uint32_t>(a.bitmask[mask * a.words + id / 32]);
      const int64_t n = std::min<int64_t>(32, a.vocabulary - id);
      if (bits == 0) {
        std::fill(logits + id, logits + id + n, lowest);
      } else if (bits != 0xffffffffu) {
        for (int64_t i = 0; i < n; ++i) {
          if (((bits >> i) & 1u) == 0) logits[id + i] = lowest;
        }
      }
    }
  }
}

}  // namespace

void apply_token_bitmask_(const ApplyTokenBitmask& a, const Parallel& parallel) {
  parallel.run(a.masks, 1, [&](int64_t begin, int64_t end) {
    switch (a.dtype) {
      case DType::kFloat32:
        return masks<float>(a, -__builtin_inff(), begin, end);
      case DType::kFloat16:
        return masks<uint16_t>(a, 0xfc00u, begin, end);
      default:
        return masks<uint16_t>(a, 0xff80u, begin, end);
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
