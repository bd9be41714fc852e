// The two grouped products of few rows an expert: as matmul_decode.cuh with x as the 64-row operand, over the tiles
// (rows of one expert) x (columns). The time is that of reading the weights of the experts in use once.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/moe_gate.cuh"
#include "kernels/cuda/moe_tables.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace quartz::kernels::cuda {

struct MoeProduct {
  MoeTables tables;
  const int64_t* ids;
  const void* bias;  // [experts, columns], or null
  void* out;         // [rows, width of the output]
  int pairs, experts, k;
  int columns;    // of the weights of an expert: 2 width, or hidden
  int out_width;  // width, or hidden
  int k_blocks;
  GateRule rule;
  bool frozen_weights;
  bool early;  // launched so; only where the tables were complete before the kernel before this one let it start
};

// How the gates and ups lie in a row of the first product; kNone: the second product.
enum class MoeGates { kNone, kHalves, kAlternating };

template <class T_, int kW_, int kX_, int kStages_, int kBlocks_, Major kMajor_, MoeGates kGates_, bool kWholeBatch_,
          bool kFew_ = false>
struct MoeDecodeTile {
  using T = T_;
  static constexpr int kW = kW_;  // columns of a tile, gates and ups together
  static constexpr int kX = kX_, kStages = kStages_, kBlocks = kBlocks_;
  static constexpr Major kMajor = kMajor_;
  static constexpr MoeGates kGates = kGates_;
  // x holds the tokens of the whole batch (at most kX), not sorted rows: rows of other experts are dropped.
  static constexpr bool kWholeBatch = kWholeBatch_;
  static constexpr bool kFew = kFew_;  // at most kFewPairs pairs: every block orders them for itself
  static constexpr int kOutColumns = kGates == MoeGates::kNone ? kW : kW / 2;
  static constexpr int kWBytes = kW * kSwizzleRow, kXBytes = kX * kSwizzleRow;
  static constexpr int kStageBytes = kBlocks * (kWBytes + kXBytes);
  static constexpr int kBarriers = kStages * kStageBytes + (64 - kX) * kSwizzleRow;
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static constexpr int kThreads = 160;
  static constexpr int kStaticBytes = (kWholeBatch ? 1024 : 0) + (kFew ? 1792 : 0) + 64;
  static_assert(kBytes + kStaticBytes <= kSharedBytes && (kMajor == Major::kK || kW % 64 == 0));
};

// The sums of a warpgroup's tile, as wgmma leaves them, get their bias. A zero is +0, as in matmul.
template <class Tile>
QUARTZ_DEVICE void finish_moe_sums(const MoeProduct& p, int expert, int panel, float (&d)[Tile::kW / 2]) {
  constexpr int kW = Tile::kW;
#pragma unroll
  for (int j = 0; j < kW / 2; ++j) d[j] = d[j] + 0.0f;
  if (p.bias == nullptr) return;
  // The lane's columns; it has two rows of each.
  constexpr bool kHalves = Tile::kGates == MoeGates::kHalves;
  const int first = panel * (kHalves ? kW / 2 : kW) + static_cast<int>(threadIdx.x & 3) * 2;
  const int left = (kHalves ? p.out_width : p.columns) - first;
  const auto* const bias = static_cast<const typename Tile::T*>(p.bias) + int64_t{expert} * p.columns + first;
  const auto* const ups = bias + p.out_width;
#pragma unroll
  for (int j = 0; j < kW / 4; ++j) {
    const bool up = kHalves && j >= kW / 8;
    const int column = (up ? j - kW / 8 : j) / 2 * 8 + j % 2;
    if (column >= left) continue;
    const float value = to_float((up ? ups : bias)[column]);
    d[j / 2 * 4 + j % 2] += value;
    d[j / 2 * 4 + 2 + j % 2] += value;
  }
}

// One of the lane's two rows (h) goes to row `row` of the output.
template <class Tile, GateKind kKind>
QUARTZ_DEVICE void store_moe_row_as(const MoeProduct& p, int64_t row, int panel, const float (&d)[Tile::kW / 2],
                                    int h) {
  using T = typename Tile::T;
  constexpr int kW = Tile::kW;
  const int pair = static_cast<int>(threadIdx.x & 3) * 2;
  constexpr bool kAlternating = Tile::kGates == MoeGates::kAlternating;
  const int first = panel * Tile::kOutColumns + (kAlternating ? pair / 2 : pair), left = p.out_width - first;
  uint16_t* const out = static_cast<uint16_t*>(p.out) + row * p.out_width + first;
  if constexpr (Tile::kGates == MoeGates::kNone) {
#pragma unroll
    for (int j = 0; j < kW / 8; ++j)
      if (8 * j < left) *reinterpret_cast<uint32_t*>(out + 8 * j) = pack<T>(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
  } else if constexpr (kAlternating) {  // gate and up of one column beside each other
#pragma unroll
    for (int j = 0; j < kW / 8; ++j) {
      const float v = gate<kKind>(p.rule, d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
      if (4 * j < left) out[4 * j] = static_cast<uint16_t>(pack<T>(v, v));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kW / 16; ++j) {
      const float *g = d + 4 * j + 2 * h, *u = g + kW / 4;
      const float v0 = gate<kKind>(p.rule, g[0], u[0]), v1 = gate<kKind>(p.rule, g[1], u[1]);
      if (8 * j < left) *reinterpret_cast<uint32_t*>(out + 8 * j) = pack<T>(v0, v1);
    }
  }
}
template <class Tile>
QUARTZ_DEVICE void store_moe_row(const MoeProduct& p, int64_t row, int panel, const float (&d)[Tile::kW / 2], int h) {
  if (Tile::kGates == MoeGates::kNone || p.rule.plain)
    store_moe_row_as<Tile, GateKind::kPlain>(p, row, panel, d, h);
  else if (p.rule.activation == GateActivation::kSilu)
    store_moe_row_as<Tile, GateKind::kSilu>(p, row, panel, d, h);
  else if (p.rule.activation == GateActivation::kGeluTanh)
    store_moe_row_as<Tile, GateKind::kGeluTanh>(p, row, panel, d, h);
  else
    store_moe_row_as<Tile, GateKind::kRelu>(p, row, panel, d, h);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    moe_decode_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                      const __grid_constant__ MoeProduct p) {
  using T = typename Tile::T;
  constexpr int kBlocks = Tile::kBlocks, kStages = Tile::kStages, kW = Tile::kW;
  constexpr bool kUp = Tile::kGates != MoeGates::kNone;
  const uint32_t base = shared_address(aligned_shared());
  Ring ring(base + Tile::kBarriers, kStages);
  if (threadIdx.x == 0) ring.init(1);
  __syncthreads();
  // The first product waits for the kernel before it, and only then lets the second start: when that one runs, the ids
  // and the tables are complete, and it can fetch weights before the first product has ended.
  if constexpr (kUp) wait_for_previous_kernel();
  let_next_kernel_start();

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const MoeTile* tile_table = kUp ? p.tables.up_tiles : p.tables.down_tiles;
  const int* pair_of = p.tables.pair_of;
  int row_tiles;
  if constexpr (Tile::kFew) {
    __shared__ FewPairs few;
    few.order(p.ids, p.pairs, p.experts, kUp ? kFewPairs : Tile::kX);
    tile_table = few.tiles;
    pair_of = few.pair_of;
    row_tiles = few.tile_count;
    if (kUp && blockIdx.x == 0 && threadIdx.x < p.pairs) p.tables.row_of[threadIdx.x] = few.row_of[threadIdx.x];
  } else {
    row_tiles = *reinterpret_cast<volatile const int*>(p.tables.counts + (kUp ? 0 : 1));
  }
  const int panels = (p.out_width + Tile::kOutColumns - 1) / Tile::kOutColumns;
  const int tiles = row_tiles * panels, steps = (p.k_blocks + kBlocks - 1) / kBlocks;

  if (warp == 4) {
    if (lane != 0) return;
    const uint64_t once = evict_first_policy(), again = evict_last_policy();
    const auto copy_w = [&](int expert, int panel, int step, int stage) {
      const uint32_t full = ring.full + 8 * stage;
      uint32_t to = base + stage * Tile::kStageBytes + kBlocks * Tile::kXBytes;
      barrier_expect(full, Tile::kStageBytes);
      if constexpr (Tile::kMajor == Major::kK) {
        if constexpr (Tile::kGates == MoeGates::kHalves) {
          // Blocks of [gates; ups]: one box of gates and one of ups for each block of k.
          for (int i = 0; i < kBlocks; ++i, to += Tile::kWBytes) {
            copy_4d(to, w_map, 0, panel * (kW / 2), step * kBlocks + i, expert, full, once);
            copy_4d(to + Tile::kWBytes / 2, w_map, 0, p.out_width + panel * (kW / 2), step * kBlocks + i, expert, full,
                    once);
          }
        } else {
          copy_4d(to, w_map, 0, panel * kW, step * kBlocks, expert, full, once);
        }
      } else {
        for (int i = 0; i < kBlocks; ++i)
          for (int j = 0; j < kW / 64; ++j, to += 8192)
            copy_3d(to, w_map, panel * kW + j * 64, (step * kBlocks + i) * 64, expert, full, once);
      }
    };
    const auto copy_x = [&](int row, int step, int stage) {
      copy_4d(base + stage * Tile::kStageBytes, x_map, 0, row, step * kBlocks, 0, ring.full + 8 * stage, again);
    };
    bool begun = false;
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      const MoeTile tile = tile_table[t / panels];
      const int panel = t % panels, row = Tile::kWholeBatch ? 0 : tile.row;
      int step = 0;
      if (!begun) {
        begun = true;
        const int fill = min(steps, kStages);
        if (!kUp && !p.frozen_weights) wait_for_previous_kernel();
        for (int i = 0; i < fill; ++i) copy_w(tile.expert, panel, i, i);
        if (!kUp) {
          prefetch_map(x_map);
          wait_for_previous_kernel();
        }
        for (; step < fill; ++step, ring.next()) copy_x(row, step, step);
      }
      for (; step < steps; ++step, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        copy_w(tile.expert, panel, step, ring.stage);
        copy_x(row, step, ring.stage);
      }
    }
    if (!begun) wait_for_previous_kernel();
    return;
  }

  // Of each token of the whole batch: its first row in this tile, and how many (an id may be given twice). Two copies,
  // for this tile and the next.
  __shared__ int first_row[Tile::kWholeBatch ? 2 : 1][64], row_count[Tile::kWholeBatch ? 2 : 1][64];
  int parity = 0;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x, parity ^= 1) {
    const MoeTile tile = tile_table[t / panels];
    const int panel = t % panels, i = threadIdx.x;
    if constexpr (Tile::kWholeBatch) {
      if (i < 64) row_count[parity][i] = 0;
      named_barrier(1, 128);
      if (i < tile.rows) {
        const int token = pair_of[tile.row + i] / p.k;
        if (i == 0 || pair_of[tile.row + i - 1] / p.k != token) {
          int n = 1;
          while (i + n < tile.rows && pair_of[tile.row + i + n] / p.k == token) ++n;
          first_row[parity][token] = tile.row + i;
          row_count[parity][token] = n;
        }
      }
      named_barrier(1, 128);
    }
    float d[kW / 2];
    int previous = 0;
    for (int step = 0; step < steps; ++step, ring.next()) {
      barrier_wait(ring.full_barrier(), ring.parity);
      const uint32_t x = base + ring.stage * Tile::kStageBytes, w = x + kBlocks * Tile::kXBytes;
      wgmma_fence();
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const uint64_t a = Operand<Major::kK>::descriptor(x + block * Tile::kXBytes);
        const uint64_t b = Operand<Tile::kMajor>::descriptor(w + block * Tile::kWBytes);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          Wgmma<T, kW, Major::kK, Tile::kMajor>::run(d, a + j * Operand<Major::kK>::kStep,
                                                     b + j * Operand<Tile::kMajor>::kStep, block + j > 0 ? 1 : step);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0 && i == 0) barrier_arrive(ring.empty + 8 * previous);
      previous = ring.stage;
    }
    wgmma_wait<0>();
    if (i == 0) barrier_arrive(ring.empty + 8 * previous);

    finish_moe_sums<Tile>(p, tile.expert, panel, d);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int m = warp * 16 + (lane >> 2) + 8 * h;
      int row = 0, rows = 0;
      if constexpr (Tile::kWholeBatch) {
        rows = m < Tile::kX ? row_count[parity][m] : 0;
        row = rows > 0 ? first_row[parity][m] : 0;
      } else {
        rows = m < tile.rows ? 1 : 0;
        row = tile.row + m;
      }
      if (rows == 0) continue;
#pragma unroll 1
      for (int r = 0; r < rows; ++r) store_moe_row<Tile>(p, int64_t{row} + r, panel, d, h);
    }
  }
}

// [matrices, rows, k], the k of a row adjacent, in boxes of `box` rows and `blocks` blocks of 64 k.
inline CUtensorMap moe_k_major_map(const void* data, DType dtype, int64_t matrices, int64_t rows, int64_t k,
                                   int64_t row_stride, int box, int blocks) {
  return tensor_map(data, dtype,
                    {{64, 1, 64},
                     {rows, row_stride, box},
                     {k / 64, 64, blocks},
                     {matrices, matrices > 1 ? rows * row_stride : 64, 1}});
}

template <class Tile>
CUtensorMap moe_weight_map(const void* data, DType dtype, int64_t experts, int64_t columns, int64_t k) {
  if (Tile::kMajor == Major::kMN)
    return tensor_map(data, dtype, {{columns, 1, 64}, {k, columns, 64}, {experts, k * columns, 1}});
  constexpr bool kHalves = Tile::kGates == MoeGates::kHalves;
  return moe_k_major_map(data, dtype, experts, columns, k, k, kHalves ? Tile::kW / 2 : Tile::kW,
                         kHalves ? 1 : Tile::kBlocks);
}

template <class Tile>
void run_moe_decode(const CUtensorMap& x, const CUtensorMap& w, const MoeProduct& p, void* stream) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(moe_decode_kernel<Tile>, Tile::kBytes, allowed);
  launch(moe_decode_kernel<Tile>,
         {dim3(static_cast<unsigned>(multiprocessors())), Tile::kThreads, Tile::kBytes, 1, 1, p.early}, stream, x, w,
         p);
}

}  // namespace quartz::kernels::cuda
