// One block a row.
#include "kernels/ngram_propose.h"

#include <cuda_runtime.h>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) ngram_propose_kernel(const NgramPropose a) {
  __shared__ uint64_t ranks[kWarps];
  const int64_t row = blockIdx.x;
  const int64_t* tokens = a.tokens + row * a.width;
  const int64_t length = ngram_length(a, row);
  uint64_t best = 0;
  if (length > 0) {
    const int64_t last = tokens[length - 1];
    for (int64_t e = threadIdx.x; e + 1 < length; e += kThreads) {
      if (tokens[e] == last) best = max(best, ngram_rank(a, ngram_match(a, tokens, length, e), e));
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    best = max(best, static_cast<uint64_t>(__shfl_xor_sync(~0u, best, offset)));
  }
  if (threadIdx.x % 32 == 0) ranks[threadIdx.x / 32] = best;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) best = max(best, ranks[w]);
  const int64_t count = ngram_count(a, length, best);
  if (threadIdx.x == 0) a.counts[row] = count;
  for (int64_t j = threadIdx.x; j < a.drafts; j += kThreads) {
    a.proposed[row * a.drafts + j] = j < count ? tokens[ngram_end(a, best) + 1 + j] : -1;
  }
}

}  // namespace

void ngram_propose(const NgramPropose& a, void* stream) {
  if (a.rows == 0) return;
  ngram_propose_kernel<<<static_cast<unsigned>(a.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
}

}  // namespace quartz::kernels::cuda
