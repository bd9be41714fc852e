// Products of few rows (decoding): the time is that of reading the weights once, so each block keeps some 200 KB of
// copies in flight, and the tile is as wide as makes one even wave of blocks.
//
// One warp starts the copies of x and w, one warpgroup multiplies. The 64 rows that wgmma wants are
// - the weights, if kSwap (x is the narrow operand of kX = 8 or 16 columns);
// - x otherwise: only kX rows are loaded, what lies behind them is multiplied too and never stored. Then the width kW
//   of the weights' tile is free.
// Blocks take tiles in turn, so the copies of the next tile run while the last one ends.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_tiles.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace quartz::kernels::cuda {

template <class T_, bool kSwap_, int kW_, int kX_, int kStages_, int kBlocks_, bool kActivate_ = kSwap_>
struct DecodeTile {
  using T = T_;
  static constexpr bool kSwap = kSwap_, kActivate = kActivate_;
  static constexpr int kW = kW_, kX = kX_, kStages = kStages_;
  static constexpr int kBlocks = kBlocks_;  // blocks of 64 k in a stage
  static constexpr int kColumns = kSwap ? kX : kW;
  static constexpr int kWBytes = kW * kSwizzleRow, kXBytes = kX * kSwizzleRow;
  static constexpr int kStageBytes = kBlocks * (kWBytes + kXBytes);
  static constexpr int kSlack = kSwap ? 0 : (64 - kX) * kSwizzleRow;  // behind the last stage's x
  static constexpr int kBarriers = kStages * kStageBytes + kSlack;
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static constexpr int kThreads = 160;
  static_assert(kBytes <= kSharedBytes && (kSwap ? kW == 64 : kX <= 64));
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    decode_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                  const __grid_constant__ Product p) {
  using T = typename Tile::T;
  constexpr int kBlocks = Tile::kBlocks, kStages = Tile::kStages;
  constexpr int kAhead = Tile::kSwap ? 2 : 4;  // stages of weights that may change, fetched early; measured
  const uint32_t base = shared_address(aligned_shared());
  Ring ring(base + Tile::kBarriers, kStages);
  if (threadIdx.x == 0) ring.init(1);
  __syncthreads();
  let_next_kernel_start();

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int m_tiles = (p.m + Tile::kX - 1) / Tile::kX, n_tiles = (p.n + Tile::kW - 1) / Tile::kW;
  const int tiles = m_tiles * n_tiles * p.batch;
  const int steps = (p.k_blocks + kBlocks - 1) / kBlocks;
  struct Position {
    int batch, m, n;  // of the first element
  };
  const auto position = [&](int tile) {
    if (m_tiles == 1 && p.batch == 1) return Position{0, 0, tile * Tile::kW};
    const int column = tile / m_tiles;
    return Position{column / n_tiles, (tile - column * m_tiles) * Tile::kX, column % n_tiles * Tile::kW};
  };

  if (warp == 4) {
    if (lane != 0) return;
    const uint64_t once = evict_first_policy(), again = evict_last_policy();
    // kBlocks blocks of 64 k: one box if k is a multiple of 64, else a box each.
    const auto copy = [&](uint32_t to, int bytes, const CUtensorMap& map, int row, int step, int batch,
                          uint32_t barrier, uint64_t policy) {
      if (p.whole_blocks) {
        copy_4d(to, map, 0, row, step * kBlocks, batch, barrier, policy);
      } else {
        for (int i = 0; i < kBlocks; ++i)
          copy_4d(to + i * bytes, map, (step * kBlocks + i) * 64, row, 0, batch, barrier, policy);
      }
    };
    const auto copy_x = [&](const Position& at, int step, int stage) {
      copy(base + stage * Tile::kStageBytes, Tile::kXBytes, x_map, at.m, step, at.batch * p.x_batched,
           ring.full + 8 * stage, again);
    };
    const auto copy_w = [&](const Position& at, int step, int stage) {
      barrier_expect(ring.full + 8 * stage, Tile::kStageBytes);
      copy(base + stage * Tile::kStageBytes + kBlocks * Tile::kXBytes, Tile::kWBytes, w_map, at.n, step,
           at.batch * p.w_batched, ring.full + 8 * stage, once);
    };
    const auto prefetch_w = [&](const Position& at, int step) {
      const int batch = at.batch * p.w_batched;
      if (p.whole_blocks) return prefetch_4d(w_map, 0, at.n, step * kBlocks, batch);
      for (int i = 0; i < kBlocks; ++i) prefetch_4d(w_map, (step * kBlocks + i) * 64, at.n, 0, batch);
    };
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Position at = position(tile);
      int step = 0;
      if (tile == static_cast<int>(blockIdx.x)) {  // the first fill
        const int fill = min(steps, kStages);
        while_previous_kernel_runs(
            p.frozen_weights, x_map,
            [&] {
              for (int i = 0; i < fill; ++i) copy_w(at, i, i);
            },
            [&] {
              for (int i = 0; i < min(fill, kAhead); ++i) prefetch_w(at, i);
            });
        for (; step < fill; ++step, ring.next()) copy_x(at, step, step);
      }
      for (; step < steps; ++step, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        copy_w(at, step, ring.stage);
        copy_x(at, step, ring.stage);
      }
    }
    return;
  }

  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float d[Tile::kColumns / 2];
    int previous = 0;
    for (int step = 0; step < steps; ++step, ring.next()) {
      barrier_wait(ring.full_barrier(), ring.parity);
      const uint32_t x = base + ring.stage * Tile::kStageBytes, w = x + kBlocks * Tile::kXBytes;
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint64_t x_tile = Operand<Major::kK>::descriptor(x + block * Tile::kXBytes);
        const uint64_t w_tile = Operand<Major::kK>::descriptor(w + block * Tile::kWBytes);
        const uint64_t a = Tile::kSwap ? w_tile : x_tile, b = Tile::kSwap ? x_tile : w_tile;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          Wgmma<T, Tile::kColumns>::run(d, a + i * Operand<Major::kK>::kStep, b + i * Operand<Major::kK>::kStep,
                                        block + i > 0 ? 1 : step);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0 && threadIdx.x == 0) barrier_arrive(ring.empty + 8 * previous);
      previous = ring.stage;
    }
    wgmma_wait<0>();
    if (threadIdx.x == 0) barrier_arrive(ring.empty + 8 * previous);

    const Position at = position(tile);
    if constexpr (!Tile::kSwap) {
      finish_sums<T, Tile::kW, Tile::kActivate>(p, at.batch, at.m, at.n, d);
      const int rows = min(Tile::kX, p.m - at.m);
      if (p.vector_stores && tiles <= static_cast<int>(gridDim.x)) {
        named_barrier(1, 128);  // the only tile: nobody multiplies from the stages any more
        store_sums_turned<T, Tile::kW>(p, at.batch, at.m, rows, at.n, d, base + warp * kTurnBytes<Tile::kW>);
      } else {
        store_sums_directly<T, Tile::kW>(p, at.batch, at.m, rows, at.n, d);
      }
      continue;
    }
    // Rows of d are n, its columns m.
    const LaneRows of_lane;
    const int n = at.n + of_lane.row;
#pragma unroll
    for (int j = 0; j < Tile::kX / 4; ++j) {
      const int m = at.m + of_lane.column + j / 2 * 8 + j % 2;
      if (m >= p.m) continue;
      const float first = d[j / 2 * 4 + j % 2], second = d[j / 2 * 4 + j % 2 + 2];  // columns n and n + 8
      if (p.plain && !p.out_float && p.activation == Activation::kNone) {
        uint16_t* const out = static_cast<uint16_t*>(p.out) + at.batch * p.out_batch + m * p.out_row + n;
        const uint32_t bits = pack<T>(first + 0.0f, second + 0.0f);
        if (n < p.n) out[0] = static_cast<uint16_t>(bits);
        if (n + 8 < p.n) out[8] = static_cast<uint16_t>(bits >> 16);
      } else {
        const Row<T, Tile::kActivate> out(p, at.batch, m);
        out.put(n, first);
        out.put(n + 8, second);
      }
    }
  }
}

// [rows, k] of every batch in boxes of `rows_of_box` rows and `blocks` blocks of 64 k.
inline CUtensorMap decode_map(const void* data, DType dtype, int64_t batch, int64_t rows, int64_t k,
                              int64_t batch_stride, int64_t row_stride, int rows_of_box, int blocks) {
  const bool whole = k % 64 == 0, batched = batch > 1 && batch_stride != 0;
  return tensor_map(data, dtype,
                    {{whole ? 64 : k, 1, 64},
                     {rows, row_stride, rows_of_box},
                     {whole ? k / 64 : 1, 64, whole ? blocks : 1},
                     {batched ? batch : 1, batched ? batch_stride : 64, 1}});
}

template <class Tile>
void run_decode(const Matmul& a) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(decode_kernel<Tile>, Tile::kBytes, allowed);
  const int64_t tiles = (a.m + Tile::kX - 1) / Tile::kX * ((a.n + Tile::kW - 1) / Tile::kW) * a.batch;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors()));
  launch(decode_kernel<Tile>, {dim3(grid), Tile::kThreads, Tile::kBytes, 1, 1, true}, a.stream,
         decode_map(a.x, a.dtype, a.batch, a.m, a.k, a.x_batch, a.x_row, Tile::kX, Tile::kBlocks),
         decode_map(a.w, a.dtype, a.batch, a.n, a.k, a.w_batch, a.w_row, Tile::kW, Tile::kBlocks), product_of(a));
}

}  // namespace quartz::kernels::cuda
