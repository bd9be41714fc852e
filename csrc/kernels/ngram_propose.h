// Drafts from the request's own tokens: what followed an earlier occurrence of the longest suffix. For every end e
// before the last token, m(e) is the number of tokens up to e that equal the tokens up to the end of the row, at most
// `longest`. The largest m(e) >= `shortest` wins; of equal ones the latest e (or the earliest). The drafts are the
// tokens behind e.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct NgramPropose {
  const int64_t* tokens;   // (rows, width), contiguous
  const int64_t* lengths;  // how many tokens of the row count; null: all
  int64_t rows, width, shortest, longest, drafts;
  bool earliest;
  int64_t *proposed, *counts;  // (rows, drafts), -1 behind the last; how many there are
};

QUARTZ_HD int64_t ngram_length(const NgramPropose& a, int64_t row) {
  const int64_t length = a.lengths != nullptr ? a.lengths[row] : a.width;
  return length < 0 ? 0 : length > a.width ? a.width : length;
}
QUARTZ_HD int64_t ngram_match(const NgramPropose& a, const int64_t* tokens, int64_t length, int64_t end) {
  int64_t match = 0;
  while (match < a.longest && match <= end && tokens[end - match] == tokens[length - 1 - match]) ++match;
  return match;
}
// Grows with the length of the match, then with the preference among equal ones; 0 is none.
QUARTZ_HD uint64_t ngram_rank(const NgramPropose& a, int64_t match, int64_t end) {
  if (match < a.shortest) return 0;
  return static_cast<uint64_t>(match) << 40 | static_cast<uint64_t>(a.earliest ? a.width - end : end + 1);
}
QUARTZ_HD int64_t ngram_end(const NgramPropose& a, uint64_t rank) {
  const auto place = static_cast<int64_t>(rank & ((uint64_t{1} << 40) - 1));
  return a.earliest ? a.width - place : place - 1;
}
QUARTZ_HD int64_t ngram_count(const NgramPropose& a, int64_t length, uint64_t rank) {
  if (rank == 0) return 0;
  const int64_t left = length - 1 - ngram_end(a, rank);
  return left < a.drafts ? left : a.drafts;
}

QUARTZ_CPU_KERNEL(void, ngram_propose, (const NgramPropose& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void ngram_propose(const NgramPropose& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
