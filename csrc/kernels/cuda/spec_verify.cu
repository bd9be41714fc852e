// One thread a request: drafts are a handful of tokens.
#include "kernels/spec_verify.h"

#include <cuda_runtime.h>

namespace quartz::kernels::cuda {
namespace {

__global__ void spec_verify_kernel(const SpecVerify a) {
  const int64_t request = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (request < a.requests) spec_verify_request(a, request);
}

}  // namespace

void spec_verify(const SpecVerify& a, void* stream) {
  if (a.requests == 0) return;
  constexpr int kThreads = 32;
  const auto blocks = static_cast<unsigned>((a.requests + kThreads - 1) / kThreads);
  spec_verify_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
}

}  // namespace quartz::kernels::cuda
