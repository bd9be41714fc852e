#include "kernels/moe_experts.h"

#include <vector>

namespace quartz::kernels {

// Counting sort.
void moe_order(const MoeOrder& a) {
  std::vector<int32_t> next(static_cast<std::size_t>(a.experts) + 1, 0);
  const auto valid = [&](int64_t id) { return id >= 0 && id < a.experts; };
  for (int64_t p = 0; p < a.count; ++p) {
    if (valid(a.ids[p])) ++next[static_cast<std::size_t>(a.ids[p]) + 1];
  }
  for (int64_t e = 0; e < a.experts; ++e) {
    next[e + 1] += next[e];
    a.ends[e] = next[e + 1];
  }
  for (int64_t p = 0; p < a.count; ++p) {
    if (!valid(a.ids[p])) {
      a.row_of[p] = -1;
      continue;
    }
    const int32_t row = next[static_cast<std::size_t>(a.ids[p])]++;
    a.pairs[row] = static_cast<int32_t>(p);
    a.row_of[p] = row;
  }
}

}  // namespace quartz::kernels
