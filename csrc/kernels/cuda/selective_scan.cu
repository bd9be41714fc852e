#include "kernels/selective_scan.h"

#include "kernels/cuda/launch.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 64;

// A thread a channel: the tokens are a chain anyway.
__global__ void __launch_bounds__(kThreads) scan(const SelectiveScan a) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < a.batch * a.channels) selective_scan_channel(a, row);
}

}  // namespace

void selective_scan(const SelectiveScan& a, void* stream) {
  const int64_t rows = a.batch * a.channels;
  if (rows == 0) return;
  scan<<<static_cast<unsigned>((rows + kThreads - 1) / kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  check(cudaGetLastError(), "selective scan");
}

}  // namespace quartz::kernels::cuda
