// The planner by one block of threads.
#include <cuda_runtime.h>

#include "kernels/attention_cuda.h"
#include "kernels/attention_planner.h"
#include "kernels/cuda/launch.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;

class Block {
 public:
  explicit __device__ Block(int32_t* warp_sums) : warp_sums_(warp_sums) {}
  __device__ int rank() const { return threadIdx.x; }
  __device__ int size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ void add(int32_t* to, int32_t value) const { atomicAdd(to, value); }
  __device__ void max(int32_t* to, int32_t value) const { atomicMax(to, value); }

  // Each warp for itself.
  template <class Predicate>
  __device__ int first(int from, const Predicate& holds) const {
    for (;; from += 32) {
      const unsigned found = __ballot_sync(~0u, holds(from + rank() % 32));
      if (found != 0) return from + __ffs(found) - 1;
    }
  }

  // Each thread adds up a run of neighbours; the runs' sums are scanned by warps.
  __device__ __noinline__ void scan(int32_t* counts, int n) const {
    __syncthreads();
    const int run = (n + kThreads - 1) / kThreads, begin = min(n, rank() * run), end = min(n, begin + run);
    int32_t own = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) own += counts[i];
    const int lane = rank() % 32, warp = rank() / 32;
    int32_t inclusive = own;
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (lane == 31) warp_sums_[warp] = inclusive;
    __syncthreads();
    int32_t before = lane < kWarps ? warp_sums_[lane] : 0;
#pragma unroll 1
    for (int step = 1; step < kWarps; step *= 2) {
      const int32_t other = __shfl_up_sync(~0u, before, step);
      if (lane >= step) before += other;
    }
    before = __shfl_sync(~0u, before, warp - 1);  // of warp 0: not used
    int32_t sum = inclusive - own + (warp > 0 ? before : 0);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const int32_t count = counts[i];
      counts[i] = sum;
      sum += count;
    }
    if (rank() == kThreads - 1) counts[n] = sum;
    __syncthreads();
  }

 private:
  static __device__ int min(int a, int b) { return a < b ? a : b; }
  int32_t* warp_sums_;
};

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const AttentionPlanInput input, const AttentionPlanRoom room, int32_t* words, bool in_shared) {
  extern __shared__ int32_t scratch[];
  __shared__ int32_t warp_sums[kWarps];
  const Block block(warp_sums);
  AttentionPlanner<Block>(block, input, room, words, in_shared ? scratch : words + room.scratch_at()).run();
}

}  // namespace

void make_attention_plan(const AttentionPlan& plan, int32_t* words, void* stream) {
  constexpr int64_t kMostShared = 200 * 1024;
  const int64_t bytes = plan.room.scratch() * 4;
  const bool in_shared = bytes <= kMostShared;
  static std::atomic<uint64_t> prepared{0};
  if (in_shared && bytes > 48 * 1024) allow_shared_bytes(plan_kernel, kMostShared, prepared);
  plan_kernel<<<1, kThreads, in_shared ? bytes : 0, static_cast<cudaStream_t>(stream)>>>(plan.input, plan.room, words,
                                                                                         in_shared);
  check(cudaGetLastError(), "attention plan");
}

}  // namespace quartz::kernels::cuda
