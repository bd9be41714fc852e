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

// A stable counting sort of the pairs by expert: counts, then places. A warp takes 32 x kUnroll pairs at a time, in
// order. `mine` counts the warp's pairs of each expert; row_of gets a pair's place among them.
__device__ void count_pairs(const int64_t* ids, int begin, int end, int experts, int* mine, int* row_of) {
  const int lane = threadIdx.x & 31;
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
      if (p < end) row_of[p] = e >= 0 ? before + rank : -1;
    }
  }
}

// Row_of becomes a pair's row: its place so far, plus what `first_row` says of its expert.
__device__ void place_pairs(const int64_t* ids, int begin, int end, int step, int thread, const int* first_row,
                            const int* second, const MoeTables& tables) {
  for (int base = begin; base < end; base += step * kUnroll) {
    int expert[kUnroll], local[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int p = base + step * u + thread;
      expert[u] = p < end ? static_cast<int>(ids[p]) : -1;
      local[u] = p < end ? tables.row_of[p] : -1;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int p = base + step * u + thread;
      if (local[u] < 0) continue;
      const int row = first_row[expert[u]] + (second != nullptr ? second[expert[u]] : 0) + local[u];
      tables.row_of[p] = row;
      tables.pair_of[row] = p;
    }
  }
}

// Thread e makes the tiles of expert e, which has `total` rows; returns the first of them. By a block of kThreads.
__device__ int make_tiles(int total, int experts, MoeCaps caps, const MoeTables& tables, int (*warp_sums)[kWarps]) {
  const int e = threadIdx.x;
  const int up_tiles = (total + caps.up - 1) / caps.up, down_tiles = (total + caps.down - 1) / caps.down;
  int sums[3] = {total, up_tiles, down_tiles};
  block_scan(sums, warp_sums);
  const int row = sums[0] - total;
  for (int i = 0; i < up_tiles; ++i)
    tables.up_tiles[sums[1] - up_tiles + i] = moe_tile(e, row, total, caps.up, caps.group, i);
  for (int i = 0; i < down_tiles; ++i)
    tables.down_tiles[sums[2] - down_tiles + i] = moe_tile(e, row, total, caps.down, caps.group, i);
  if (e == kThreads - 1) {
    tables.counts[0] = sums[1];
    tables.counts[1] = sums[2];
    tables.counts[2] = 0;
  }
  return row;
}

// All in one block: each warp has a contiguous part of the pairs and counts of its own.
__global__ void __launch_bounds__(kThreads)
    order_kernel(const int64_t* ids, int pairs, int experts, MoeCaps caps, MoeTables tables) {
  extern __shared__ int counts[];  // [kWarps][experts]
  __shared__ int warp_sums[3][kWarps], first_row[kMaxMoeExperts];
  const int warp = threadIdx.x >> 5;
  let_next_kernel_start();
  for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) counts[i] = 0;
  __syncthreads();
  wait_for_previous_kernel();

  const int share = (pairs + 32 * kWarps - 1) / (32 * kWarps) * 32, begin = warp * share,
            end = min(pairs, begin + share);
  int* mine = counts + warp * experts;
  count_pairs(ids, begin, end, experts, mine, tables.row_of);
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
  const int row = make_tiles(total, experts, caps, tables, warp_sums);
  if (e < experts) first_row[e] = row;
  __syncthreads();
  place_pairs(ids, begin, end, 32, threadIdx.x & 31, first_row, mine, tables);
}

// Three kernels, for many pairs. First: each block counts kMoePart pairs.
constexpr int kPartThreads = 256, kPartWarps = kPartThreads / 32;
__global__ void __launch_bounds__(kPartThreads)
    count_kernel(const int64_t* ids, int pairs, int experts, MoeTables tables) {
  extern __shared__ int counts[];  // [kPartWarps][experts]
  const int warp = threadIdx.x >> 5;
  let_next_kernel_start();
  for (int i = threadIdx.x; i < kPartWarps * experts; i += kPartThreads) counts[i] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  constexpr int kShare = kMoePart / kPartWarps;
  const int begin = blockIdx.x * kMoePart + warp * kShare, end = min(pairs, begin + kShare);
  count_pairs(ids, begin, end, experts, counts + warp * experts, tables.row_of);
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += kPartThreads) {
    int total = 0;
    for (int w = 0; w < kPartWarps; ++w) {
      const int n = counts[w * experts + e];
      counts[w * experts + e] = total;
      total += n;
    }
    tables.counts_of_parts[int64_t{blockIdx.x} * experts + e] = total;
  }
  __syncthreads();
  // A pair's place among those of its block.
  for (int p = begin + (threadIdx.x & 31); p < end; p += 32) {
    const int local = tables.row_of[p];
    if (local >= 0) tables.row_of[p] = local + counts[warp * experts + ids[p]];
  }
}

// Second: one block makes the tiles, and the first row of each expert in each part.
__global__ void __launch_bounds__(kThreads) first_rows_kernel(int parts, int experts, MoeCaps caps, MoeTables tables) {
  __shared__ int warp_sums[3][kWarps];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int e = threadIdx.x;
  int total = 0;
  int* const mine = tables.counts_of_parts + e;
  if (e < experts) {
#pragma unroll 16
    for (int part = 0; part < parts; ++part) total += mine[int64_t{part} * experts];
  }
  int row = make_tiles(total, experts, caps, tables, warp_sums);
  if (e >= experts) return;
  for (int part = 0; part < parts; part += 16) {
    int n[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) n[i] = part + i < parts ? mine[int64_t{part + i} * experts] : 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (part + i < parts) mine[int64_t{part + i} * experts] = row;
      row += n[i];
    }
  }
}

// Third.
__global__ void __launch_bounds__(kPartThreads)
    place_kernel(const int64_t* ids, int pairs, int experts, MoeTables tables) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int begin = blockIdx.x * kMoePart;
  place_pairs(ids, begin, min(pairs, begin + kMoePart), kPartThreads, threadIdx.x,
              tables.counts_of_parts + int64_t{blockIdx.x} * experts, nullptr, tables);
}

}  // namespace

void moe_order(const MoeExperts& a, const MoeTables& tables, MoeCaps caps) {
  const auto pairs = static_cast<int>(a.tokens * a.k), experts = static_cast<int>(a.experts);
  if (pairs <= kMoeOneBlock) {
    static std::atomic<uint64_t> allowed{0};
    allow_shared_bytes(order_kernel, kWarps * kMaxMoeExperts * 4, allowed);
    launch(order_kernel, {dim3(1), kThreads, kWarps * experts * 4, 1, 1, kMoeEarly}, a.stream, a.ids, pairs, experts,
           caps, tables);
    return;
  }
  const int parts = (pairs + kMoePart - 1) / kMoePart;
  const dim3 grid(static_cast<unsigned>(parts));
  launch(count_kernel, {grid, kPartThreads, kPartWarps * experts * 4, 1, 1, kMoeEarly}, a.stream, a.ids, pairs, experts,
         tables);
  launch(first_rows_kernel, {dim3(1), kThreads, 0, 1, 1, kMoeEarly}, a.stream, parts, experts, caps, tables);
  launch(place_kernel, {grid, kPartThreads, 0, 1, 1, kMoeEarly}, a.stream, a.ids, pairs, experts, tables);
}

}  // namespace quartz::kernels::cuda
