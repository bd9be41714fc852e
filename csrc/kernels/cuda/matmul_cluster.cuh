// Products of a few hundred rows: tiles of 64 or 128 x kW in clusters of kAcross x kDown blocks. The blocks of a
// cluster's row share x and those of its column share w: each block copies its part to all of them (multicast), because
// the reads from the L2 cache are what limits these shapes.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_tiles.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace quartz::kernels::cuda {

template <class T_, int kGroups_, int kW_, int kStages_, int kBlocks_, int kAcross_, int kDown_>
struct ClusterTile {
  using T = T_;
  static constexpr int kGroups = kGroups_;  // warpgroups that multiply, 64 rows each
  static constexpr int kX = 64 * kGroups, kW = kW_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr int kAcross = kAcross_, kDown = kDown_;  // blocks along n, along m
  static constexpr int kWBytes = kW * kSwizzleRow, kXBytes = kX * kSwizzleRow;
  static constexpr int kStageBytes = kBlocks * (kWBytes + kXBytes);
  static constexpr int kBarriers = kStages * kStageBytes;
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static constexpr int kThreads = 128 * kGroups + 32;
  static_assert(kBytes <= kSharedBytes && kW / kDown % 8 == 0 && kX / kAcross % 8 == 0);
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    cluster_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ Product p) {
  using T = typename Tile::T;
  constexpr int kBlocks = Tile::kBlocks, kStages = Tile::kStages, kAcross = Tile::kAcross, kDown = Tile::kDown;
  constexpr int kGroups = Tile::kGroups;
  constexpr int kAhead = 4;                    // stages of weights that may change, fetched early; measured
  constexpr int kPeers = kAcross + kDown - 1;  // blocks that a block's copies go to, itself included
  const uint32_t base = shared_address(aligned_shared());
  Ring ring(base + Tile::kBarriers, kStages);
  if (threadIdx.x == 0) ring.init(kPeers * kGroups);
  __syncthreads();
  cluster_sync();
  let_next_kernel_start();

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rank = static_cast<int>(cluster_rank()), across = rank % kAcross, down = rank / kAcross;
  const int n0 = blockIdx.x * Tile::kW, m0 = blockIdx.y * Tile::kX, batch = blockIdx.z;
  const int steps = (p.k_blocks + kBlocks - 1) / kBlocks;

  if (warp == 4 * kGroups) {
    if (lane == 0) {
      const uint64_t once = evict_first_policy(), again = evict_last_policy();
      uint16_t column = 0, row = 0;  // the blocks that share this block's w, and its x
      for (int i = 0; i < kDown; ++i) column |= 1 << (across + kAcross * i);
      for (int i = 0; i < kAcross; ++i) row |= 1 << (i + kAcross * down);
      const auto copy = [&](uint32_t to, const CUtensorMap& map, int k, int row, int matrix, uint32_t full,
                            uint64_t policy, uint16_t blocks, bool shared) {
        if (shared)
          multicast_3d(to, map, k, row, matrix, full, policy, blocks);
        else
          copy_3d(to, map, k, row, matrix, full, policy);
      };
      const auto copy_w = [&](int step, int stage) {
        const uint32_t full = ring.full + 8 * stage;
        const uint32_t to = base + stage * Tile::kStageBytes + kBlocks * Tile::kXBytes + down * (Tile::kWBytes / kDown);
        barrier_expect(full, Tile::kStageBytes);
        for (int i = 0; i < kBlocks; ++i)
          copy(to + i * Tile::kWBytes, w_map, (step * kBlocks + i) * 64, n0 + down * (Tile::kW / kDown),
               batch * p.w_batched, full, once, column, kDown > 1);
      };
      const auto prefetch_w = [&](int step) {
        for (int i = 0; i < kBlocks; ++i)
          prefetch_3d(w_map, (step * kBlocks + i) * 64, n0 + down * (Tile::kW / kDown), batch * p.w_batched);
      };
      const auto copy_x = [&](int step, int stage) {
        const uint32_t to = base + stage * Tile::kStageBytes + across * (Tile::kXBytes / kAcross);
        for (int i = 0; i < kBlocks; ++i)
          copy(to + i * Tile::kXBytes, x_map, (step * kBlocks + i) * 64, m0 + across * (Tile::kX / kAcross),
               batch * p.x_batched, ring.full + 8 * stage, again, row, kAcross > 1);
      };
      const int fill = min(steps, kStages);
      while_previous_kernel_runs(
          p.frozen_weights, x_map,
          [&] {
            for (int i = 0; i < fill; ++i) copy_w(i, i);
          },
          [&] {
            for (int i = 0; i < min(fill, kAhead); ++i) prefetch_w(i);
          });
      int step = 0;
      for (; step < fill; ++step, ring.next()) copy_x(step, step);
      for (; step < steps; ++step, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        copy_w(step, ring.stage);
        copy_x(step, ring.stage);
      }
    }
  } else {
    // Thread i < kPeers tells block `peer` that a stage may be filled again.
    const int i = threadIdx.x & 127, group = warp >> 2;
    const int peer =
        i < kAcross ? i + kAcross * down : across + kAcross * (i - kAcross < down ? i - kAcross : i - kAcross + 1);
    float d[Tile::kW / 2];
    int previous = 0;
    for (int step = 0; step < steps; ++step, ring.next()) {
      barrier_wait(ring.full_barrier(), ring.parity);
      const uint32_t x = base + ring.stage * Tile::kStageBytes, w = x + kBlocks * Tile::kXBytes;
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint64_t a = Operand<Major::kK>::descriptor(x + block * Tile::kXBytes + group * 8192);
        const uint64_t b = Operand<Major::kK>::descriptor(w + block * Tile::kWBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          Wgmma<T, Tile::kW>::run(d, a + j * Operand<Major::kK>::kStep, b + j * Operand<Major::kK>::kStep,
                                  block + j > 0 ? 1 : step);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0 && i < kPeers) barrier_arrive_at(ring.empty + 8 * previous, peer);
      previous = ring.stage;
    }
    wgmma_wait<0>();
    const int m = m0 + 64 * group;
    finish_sums<T, Tile::kW, false>(p, batch, m, n0, d);
    if (p.vector_stores) {
      named_barrier(1, 128 * kGroups);  // all have come, and nobody multiplies from the stages any more
      store_sums_turned<T, Tile::kW>(p, batch, m, min(64, p.m - m), n0, d, base + warp * kTurnBytes<Tile::kW>);
    } else {
      store_sums_directly<T, Tile::kW>(p, batch, m, min(64, p.m - m), n0, d);
    }
  }
  // No block may leave while others can still copy to it or arrive at its barriers.
  __syncwarp();
  cluster_sync();
}

template <class Tile>
void run_cluster(const Matmul& a) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(cluster_kernel<Tile>, Tile::kBytes, allowed);
  const auto whole = [](int64_t extent, int tile, int blocks) {
    return static_cast<unsigned>(((extent + tile - 1) / tile + blocks - 1) / blocks * blocks);
  };
  const auto map = [&](const void* data, int64_t rows, int64_t row_stride, int64_t batch_stride, int box) {
    const bool batched = a.batch > 1 && batch_stride != 0;
    return tensor_map(data, a.dtype,
                      {{a.k, 1, 64}, {rows, row_stride, box}, {batched ? a.batch : 1, batched ? batch_stride : 64, 1}});
  };
  launch(cluster_kernel<Tile>,
         {dim3(whole(a.n, Tile::kW, Tile::kAcross), whole(a.m, Tile::kX, Tile::kDown), static_cast<unsigned>(a.batch)),
          Tile::kThreads, Tile::kBytes, Tile::kAcross, Tile::kDown, true},
         a.stream, map(a.x, a.m, a.x_row, a.x_batch, Tile::kX / Tile::kAcross),
         map(a.w, a.n, a.w_row, a.w_batch, Tile::kW / Tile::kDown), product_of(a));
}

}  // namespace quartz::kernels::cuda
