// Exact-coupled verification: at every position the target has drawn its own token, with that position's noise; a draft
// is accepted while it equals that token. What is committed is therefore what the plain path would have drawn.
//
// Request r has the drafts cu[r] to cu[r + 1] - 1 and the target tokens cu[r] + r to cu[r + 1] + r: one more, the token
// behind the last draft. It commits target tokens up to the first that differs from its draft, the first that ends the
// request, or that one more. A target token below 0 (a row in which nothing could be drawn) commits nothing.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct SpecVerify {
  const int64_t* target_tokens;  // drafts + requests
  const int64_t* draft_tokens;
  const int64_t* cu_drafts;   // requests + 1, from 0 to drafts; what lies outside is brought inside
  const int64_t* positions;   // of the first token drawn; null: 0
  const int64_t* end_tokens;  // `end_width` a request, -1 for none
  int64_t requests, drafts, end_width;
  // Results, one a request, and the target tokens that are committed (the caller has filled `tokens` with -1).
  int64_t *accepted, *committed, *next_tokens, *next_positions, *tokens;
};

QUARTZ_HD int64_t spec_bound(const SpecVerify& a, int64_t index, int64_t at_least) {
  const int64_t value = a.cu_drafts[index];
  return value < at_least ? at_least : value > a.drafts ? a.drafts : value;
}

QUARTZ_HD void spec_verify_request(const SpecVerify& a, int64_t r) {
  const int64_t begin = spec_bound(a, r, 0), count = spec_bound(a, r + 1, begin) - begin;
  const int64_t* target = a.target_tokens + begin + r;
  int64_t committed = 0, accepted = 0, last = -1;
  for (bool go_on = true; go_on;) {
    const int64_t token = target[committed];
    last = token;
    if (token < 0) break;
    const bool same = committed < count && a.draft_tokens[begin + committed] == token;
    ++committed;
    accepted += same;
    go_on = same;
    for (int64_t i = 0; i < a.end_width; ++i) go_on = go_on && a.end_tokens[r * a.end_width + i] != token;
  }
  a.accepted[r] = accepted;
  a.committed[r] = committed;
  a.next_tokens[r] = last < 0 ? -1 : last;
  a.next_positions[r] = (a.positions != nullptr ? a.positions[r] : 0) + committed;
  for (int64_t i = 0; i < committed; ++i) a.tokens[begin + r + i] = target[i];
}

QUARTZ_CPU_KERNEL(void, spec_verify, (const SpecVerify& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void spec_verify(const SpecVerify& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
