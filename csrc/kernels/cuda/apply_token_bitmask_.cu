// A thread a token; a warp reads one word of the bitmask and writes neighbours.
#include "kernels/apply_token_bitmask_.h"

#include <cuda_runtime.h>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256, kTokens = 8 * kThreads;

template <class T>
__global__ void __launch_bounds__(kThreads) apply_token_bitmask_kernel(const ApplyTokenBitmask a, T lowest) {
  const int64_t mask = blockIdx.x, row = masked_row(a, mask);
  if (row < 0) return;
  T* logits = static_cast<T*>(a.logits) + row * a.stride;
  const int32_t* words = a.bitmask + mask * a.words;
  for (int i = 0; i < kTokens / kThreads; ++i) {
    const int64_t id = int64_t{blockIdx.y} * kTokens + i * kThreads + threadIdx.x;
    if (id < a.vocabulary && ((static_cast<uint32_t>(words[id / 32]) >> (id % 32)) & 1u) == 0) logits[id] = lowest;
  }
}

}  // namespace

void apply_token_bitmask_(const ApplyTokenBitmask& a, void* stream) {
  if (a.masks == 0 || a.vocabulary == 0) return;
  const dim3 grid(static_cast<unsigned>(a.masks), static_cast<unsigned>((a.vocabulary + kTokens - 1) / kTokens));
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (a.dtype) {
    case DType::kFloat32:
      apply_token_bitmask_kernel<float><<<grid, kThreads, 0, cuda_stream>>>(a, -__builtin_inff());
      break;
    case DType::kFloat16:
      apply_token_bitmask_kernel<uint16_t><<<grid, kThreads, 0, cuda_stream>>>(a, 0xfc00u);
      break;
    default:
      apply_token_bitmask_kernel<uint16_t><<<grid, kThreads, 0, cuda_stream>>>(a, 0xff80u);
  }
}

}  // namespace quartz::kernels::cuda
