#include "kernels/ngram_propose.h"

#include <algorithm>

namespace quartz::kernels::QUARTZ_ISA {

void ngram_propose(const NgramPropose& a, const Parallel& parallel) {
  parallel.run(a.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t* tokens = a.tokens + row * a.width;
      const int64_t length = ngram_length(a, row);
      uint64_t best = 0;
      for (int64_t e = 0; e + 1 < length; ++e) {
        if (tokens[e] == tokens[length - 1]) best = std::max(best, ngram_rank(a, ngram_match(a, tokens, length, e), e));
      }
      const int64_t count = ngram_count(a, length, best);
      a.counts[row] = count;
      for (int64_t j = 0; j < a.drafts; ++j) {
        a.proposed[row * a.drafts + j] = j < count ? tokens[ngram_end(a, best) + 1 + j] : -1;
      }
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
