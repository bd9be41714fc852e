#include "kernels/cuda/launch.h"
#include "kernels/cuda/moe_tables.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kUnroll = 4;

// Inclusive sums over the block's threads.
template <int kValues>
__device__ void block_scan(int (&values)[kValues], int (*warp_sums)[kWarps]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int v = 0; v < kValues; ++v) {
    for (int i = 1; i < 32; i <<= 1) {
      const int other = __shfl_up_sync(~0u, values[v], i);
      if (lane >= i) values[v] += other;
    }
    if (lane == 31) warp_sums[v][warp] = values[v];
  }
  __syncthreads();
  for (int v = 0; v < kValues; ++v)
    for (int w = 0; w < warp; ++w) values[v] += warp_sums[v][w];
}

// A stable counting sort: each warp has a contiguous part of the pairs and counts of its own.
__global__ void __launch_bounds__(kThreads)
    order_kernel(const int64_t* ids, int pairs, int experts, MoeCaps caps, MoeTables tables) {
  extern __shared__ int counts[];  // [kWarps][experts]
  __shared__ int warp_sums[3][kWarps], first_row[kMaxMoeExperts];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  let_next_kernel_start();
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  wait_for_previous_kernel();

  const int share = (pairs + 32 * kWarps - 1) / (32 * kWarps) * 32, begin = warp * share,
            end = min(pairs, begin + share);
  int* mine = counts + warp * experts;
  for (int base = begin; base < end; base += 32 * kUnroll) {
    int expert[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int p = base + 32 * u + lane;
      const int64_t id = p < end ? ids[p] : -1;
      expert[u] = id >= 0 && id < experts ? static_cast<int>(id) : -1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int p = base + 32 * u + lane, e = expert[u];
      const unsigned same = __match_any_sync(~0u, e);
      const int rank = __popc(same & ((1u << lane) - 1));
      const int before = e >= 0 ? mine[e] : 0;
      __syncwarp();
      if (e >= 0 && rank == 0) mine[e] = before + __popc(same);
      __syncwarp();
      if (p < end) tables.row_of[p] = e >= 0 ? before + rank : -1;  // within the warp's part, for now
    }
  }
  __syncthreads();

  const int e = threadIdx.x;
  int total = 0;
  if (e < experts) {
    for (int w = 0; w < kWarps; ++w) {
      const int n = counts[w * experts + e];
      counts[w * experts + e] = total;
      total += n;
    }
  }
  const int up_tiles = (total + caps.up - 1) / caps.up, down_tiles = (total + caps.down - 1) / caps.down;
  int sums[3] = {total, up_tiles, down_tiles};
  block_scan(sums, warp_sums);
  const int row = sums[0] - total;
  if (e < experts) first_row[e] = row;
  for (int i = 0; i < up_tiles; ++i)
    tables.up_tiles[sums[1] - up_tiles + i] = {e, row + i * caps.up, min(caps.up, total - i * caps.up), 0};
  for (int i = 0; i < down_tiles; ++i)
    tables.down_tiles[sums[2] - down_tiles + i] = {e, row + i * caps.down, min(caps.down, total - i * caps.down), 0};
  if (e == kThreads - 1) {
    tables.counts[0] = sums[1];
    tables.counts[1] = sums[2];
    tables.counts[2] = 0;
  }
  __syncthreads();

  for (int base = begin; base < end; base += 32 * kUnroll) {
    int expert[kUnroll], local[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int p = base + 32 * u + lane;
      expert[u] = p < end ? static_cast<int>(ids[p]) : -1;
      local[u] = p < end ? tables.row_of[p] : -1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int p = base + 32 * u + lane;
      if (local[u] < 0) continue;
      const int final_row = first_row[expert[u]] + mine[expert[u]] + local[u];
      tables.row_of[p] = final_row;
      tables.pair_of[final_row] = p;
    }
  }
}

}  // namespace

void moe_order(const MoeExperts& a, const MoeTables& tables, MoeCaps caps) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(order_kernel, kWarps * kMaxMoeExperts * 4, allowed);
  const int bytes = static_cast<int>(kWarps * a.experts * 4);
  launch(order_kernel, {dim3(1), kThreads, bytes, 1, 1, kMoeEarly}, a.stream, a.ids, static_cast<int>(a.tokens * a.k),
         static_cast<int>(a.experts), caps, tables);
}

}  // namespace quartz::kernels::cuda
