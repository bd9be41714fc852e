// One block: bitonic sort in shared memory, prefix sums in chunks of a thread, the best count, and how it spreads.
#include "kernels/spec_schedule.h"

#include <cuda_runtime.h>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

__global__ void __launch_bounds__(kThreads) spec_schedule_kernel(const SpecSchedule a, int padded) {
  extern __shared__ uint64_t keys[];
  __shared__ uint64_t sums[kWarps];
  __shared__ double gains[kWarps];
  __shared__ int counts[kWarps];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  for (int i = thread; i < padded; i += kThreads) keys[i] = 0;
  __syncthreads();
  for (int64_t r = thread; r < a.requests; r += kThreads) {
    schedule_keys(a, r, keys);
    a.lengths[r] = 0;
  }
  __syncthreads();
  for (int size = 2; size <= padded; size *= 2) {
    for (int step = size / 2; step > 0; step /= 2) {
      for (int i = thread; i < padded / 2; i += kThreads) {
        const int low = 2 * i - (i & (step - 1)), high = low + step;
        const bool descending = (low & size) == 0;
        const uint64_t first = keys[low], second = keys[high];
        if ((first < second) == descending) {
          keys[low] = second;
          keys[high] = first;
        }
      }
      __syncthreads();
    }
  }

  const int chunk = (padded + kThreads - 1) / kThreads, begin = thread * chunk, end = min(begin + chunk, padded);
  uint64_t own = 0;
  for (int i = begin; i < end; ++i) own += keys[i] != 0 ? schedule_mass(schedule_chance(keys[i])) : 0;
  uint64_t sum = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint64_t left = __shfl_up_sync(~0u, sum, offset);
    if (lane >= offset) sum += left;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  uint64_t mass = sum - own;
  for (int w = 0; w < warp; ++w) mass += sums[w];

  double best = thread == 0 ? schedule_gain(a, 0, 0) : -2.0;
  int chosen = 0;
  for (int i = begin; i < end && keys[i] != 0; ++i) {
    mass += schedule_mass(schedule_chance(keys[i]));
    const double gain = schedule_gain(a, i + 1, mass);
    if (gain > best) {
      best = gain;
      chosen = i + 1;
    }
  }
  const auto better = [&](double gain, int count) {
    if (gain > best || (gain == best && count < chosen)) {
      best = gain;
      chosen = count;
    }
  };
  for (int offset = 16; offset > 0; offset /= 2) {
    const double gain = __shfl_xor_sync(~0u, best, offset);
    const int count = __shfl_xor_sync(~0u, chosen, offset);
    better(gain, count);
  }
  if (lane == 0) {
    gains[warp] = best;
    counts[warp] = chosen;
  }
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) better(gains[w], counts[w]);
  for (int i = thread; i < chosen; i += kThreads) {
    atomicAdd(reinterpret_cast<unsigned long long*>(a.lengths + schedule_index(keys[i]) / a.drafts), 1ull);
  }
}

}  // namespace

void spec_schedule(const SpecSchedule& a, void* stream) {
  if (a.requests == 0) return;
  int padded = 2;
  while (padded < a.requests * a.drafts) padded *= 2;
  const size_t bytes = static_cast<size_t>(padded) * sizeof(uint64_t);
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(spec_schedule_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(kMaxScheduled * sizeof(uint64_t)));
  }
  spec_schedule_kernel<<<1, kThreads, bytes, static_cast<cudaStream_t>(stream)>>>(a, padded);
}

}  // namespace quartz::kernels::cuda
