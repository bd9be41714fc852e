// Products of many rows: 128 x kN tiles, taken in turn by one block a multiprocessor. One warp starts the copies, two
// warpgroups multiply 64 rows each and store through shared memory with the copy engine.
//
// Both operands may lie either way (Major): x as [m, k] or [k, m], w as [n, k] or [k, n].
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_tiles.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace quartz::kernels::cuda {

constexpr int kStoreBytes = 64 * 128;  // a warpgroup stores 64 rows of at most 128 bytes at a time

// Columns stored at a time: 128 bytes, or 64 where the tile is no multiple of that; 0: narrow tiles go straight from
// the registers.
template <class Out, int kN>
constexpr int kStoreColumns = kN % 32 != 0       ? 0
                              : sizeof(Out) == 4 ? 32
                              : kN % 64 == 0     ? 64
                                                 : 32;

// Through the warpgroup's two buffers in shared memory, laid out as the map of the output says (swizzled), by the copy
// engine, or by plain stores where it cannot.
template <class T, class Out, int kN>
QUARTZ_DEVICE void store_sums(const Product& p, const CUtensorMap& out_map, int batch, int m0, int n0,
                              const float (&d)[kN / 2], uint32_t buffers, int& buffer, int barrier) {
  constexpr int kColumns = kStoreColumns<Out, kN>, kRowBytes = kColumns * sizeof(Out);
  const int warp = (threadIdx.x >> 5) & 3, lane = threadIdx.x & 31;
  const bool leader = (threadIdx.x & 127) == 0;
  // The address of 16 bytes: the unit `chunk` of a row.
  const auto address = [](uint32_t tile, int row, int chunk) {
    return tile + row * kRowBytes + ((chunk ^ (kRowBytes == 128 ? row & 7 : (row >> 1) & 3)) << 4);
  };
#pragma unroll
  for (int part = 0; part < kN / kColumns; ++part, buffer ^= 1) {
    const uint32_t to = buffers + buffer * kStoreBytes;
    if (leader) wait_stores_read<1>();
    named_barrier(barrier, 128);
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float* v = d + (part * (kColumns / 8) + j) * 4 + 2 * h;
          const int row = warp * 16 + (lane >> 2) + 8 * h;
          store_shared(address(to, row, 2 * j + ((lane & 3) >> 1)) + (lane & 1) * 8, v[0], v[1]);
        }
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        const float* v = d + (part * (kColumns / 8) + j) * 4;
        store_matrices(address(to, warp * 16 + (lane & 15), j + (lane >> 4)), pack<T>(v[0], v[1]), pack<T>(v[2], v[3]),
                       pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
      }
    }
    if (p.copy_stores) fence_shared_writes();
    named_barrier(barrier, 128);
    if (p.copy_stores) {
      if (leader) {
        store_3d(out_map, n0 + part * kColumns, m0, batch, to);
        commit_stores();
      }
      continue;
    }
    const int rows = min(64, p.m - m0), columns = min(kColumns, p.n - n0 - part * kColumns);
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < rows * kColumns; i += 128) {
      const int row = i / kColumns, column = i % kColumns;
      if (column >= columns) continue;
      constexpr int kUnit = 16 / sizeof(Out);
      const uint32_t from = address(to, row, column / kUnit) + column % kUnit * sizeof(Out);
      const int64_t at = batch * p.out_batch + (m0 + row) * p.out_row + n0 + part * kColumns + column;
      if constexpr (sizeof(Out) == 4)
        static_cast<uint32_t*>(p.out)[at] = load_shared<uint32_t>(from);
      else
        static_cast<uint16_t*>(p.out)[at] = load_shared<uint16_t>(from);
    }
  }
}

template <class T_, int kN_, int kStages_, Major kXMajor_ = Major::kK, Major kWMajor_ = Major::kK,
          bool kActivate_ = false, int kSkew_ = 0, bool kRaggedK_ = false>
struct PrefillTile {
  using T = T_;
  static constexpr int kM = 128, kN = kN_, kStages = kStages_;
  static constexpr Major kXMajor = kXMajor_, kWMajor = kWMajor_;
  static constexpr bool kActivate = kActivate_;
  static constexpr int kSkew = kSkew_;
  static constexpr bool kRaggedK = kRaggedK_;  // batch b has the k of p.ranges[b], of matrices without batches
  static constexpr int kXBytes = kM * kSwizzleRow, kWBytes = kN * kSwizzleRow, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStores = kStages * kStageBytes;  // two buffers for each warpgroup
  static constexpr int kBarriers = kStores + 4 * kStoreBytes;
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static constexpr int kThreads = 384;
  static_assert(kBytes <= kSharedBytes && (kWMajor == Major::kK || kN % 64 == 0));
  static_assert(!kRaggedK || (kXMajor == Major::kMN && kWMajor == Major::kMN));
};

// A stage whose rows are the k of one m or n each (Major::kMN), from row `first` on, becomes 0: what the copy brought
// there belongs to the next group. By the 256 threads that multiply.
template <int kTiles>
QUARTZ_DEVICE void clear_rows(uint32_t stage, int first) {
  const int units = (64 - first) * 8;  // of 16 bytes, in each tile of 64 rows
  for (int i = static_cast<int>(threadIdx.x) - 128; i < kTiles * units; i += 256) {
    const uint32_t at = stage + i / units * 8192 + first * kSwizzleRow + i % units * 16;
    store_shared(at, 0.0f, 0.0f);
    store_shared(at + 8, 0.0f, 0.0f);
  }
  fence_shared_writes();
  named_barrier(4, 256);
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    prefill_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                   const __grid_constant__ CUtensorMap out_map, const __grid_constant__ Product p) {
  using T = typename Tile::T;
  constexpr int kM = Tile::kM, kN = Tile::kN, kStages = Tile::kStages;
  const uint32_t base = shared_address(aligned_shared());
  Ring ring(base + Tile::kBarriers, kStages);
  if (threadIdx.x == 0) ring.init(2);
  __syncthreads();
  let_next_kernel_start();

  const int warp = threadIdx.x >> 5;
  const int m_tiles = (p.m + kM - 1) / kM, n_tiles = (p.n + kN - 1) / kN;
  const int64_t tiles = static_cast<int64_t>(m_tiles) * n_tiles * p.batch;
  struct Position {
    int batch, m, n;  // of the first element
  };
  const auto position = [&](int64_t tile) {
    const int of_batch = m_tiles * n_tiles;
    const int batch = static_cast<int>(tile / of_batch), t = static_cast<int>(tile - int64_t{batch} * of_batch);
    const int group = t / (p.row_group * n_tiles), rest = t - group * p.row_group * n_tiles;
    const int rows = min(p.row_group, m_tiles - group * p.row_group);
    return Position{batch, (group * p.row_group + rest % rows) * kM, rest / rows * kN};
  };

  struct Range {
    int first, length, blocks;  // of k
  };
  const auto range_of = [&](const Position& at) {
    if constexpr (Tile::kRaggedK) {
      const MoeTile range = p.ranges[at.batch];
      return Range{range.row, range.rows, (range.rows + 63) / 64};
    }
    return Range{0, 0, p.k_blocks};
  };

  if (warp < 4) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    int first_k = 0;
    const auto copy_x = [&](const Position& at, int block, int stage) {
      const uint32_t to = base + stage * Tile::kStageBytes, full = ring.full + 8 * stage;
      const int batch = at.batch * p.x_batched;
      if constexpr (Tile::kXMajor == Major::kK) {
        copy_3d(to, x_map, block * 64, at.m, batch, full);
      } else {
        for (int i = 0; i < kM / 64; ++i)
          copy_3d(to + i * 8192, x_map, at.m + i * 64, first_k + block * 64, batch, full);
      }
    };
    const auto copy_w = [&](const Position& at, int block, int stage) {
      const uint32_t to = base + stage * Tile::kStageBytes + Tile::kXBytes, full = ring.full + 8 * stage;
      const int batch = at.batch * p.w_batched;
      barrier_expect(full, Tile::kStageBytes);
      if constexpr (Tile::kWMajor == Major::kK) {
        copy_3d(to, w_map, block * 64, at.n, batch, full);
      } else {
        for (int i = 0; i < kN / 64; ++i)
          copy_3d(to + i * 8192, w_map, at.n + i * 64, first_k + block * 64, batch, full);
      }
    };
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
      const Position at = position(tile);
      const Range range = range_of(at);
      first_k = range.first;
      int block = 0;
      if (tile == blockIdx.x) {  // the first fill: weights while the previous kernel still runs
        const int fill = min(range.blocks, kStages);
        if (!p.frozen_weights) wait_for_previous_kernel();
        for (int i = 0; i < fill; ++i) copy_w(at, i, i);
        if (p.frozen_weights) {
          prefetch_map(x_map);
          wait_for_previous_kernel();
        }
        for (; block < fill; ++block, ring.next()) copy_x(at, block, block);
      }
      for (; block < range.blocks; ++block, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        copy_w(at, block, ring.stage);
        copy_x(at, block, ring.stage);
      }
    }
    return;
  }

  take_registers<240>();
  const int group = (warp >> 2) - 1;  // of the two warpgroups
  const bool leader = (threadIdx.x & 127) == 0;
  const uint32_t buffers = base + Tile::kStores + group * 2 * kStoreBytes;
  int buffer = 0;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Position at = position(tile);
    const Range range = range_of(at);
    float d[kN / 2];
    int previous = 0;
    for (int block = 0; block < range.blocks; ++block, ring.next()) {
      if (Tile::kSkew > 0 && tile == blockIdx.x) skew_warpgroups<Tile::kSkew>(group, block, range.blocks);
      barrier_wait(ring.full_barrier(), ring.parity);
      const uint32_t x = base + ring.stage * Tile::kStageBytes;
      if (Tile::kRaggedK && block == range.blocks - 1 && range.length % 64 != 0)
        clear_rows<(kM + kN) / 64>(x, range.length % 64);
      const uint64_t a = Operand<Tile::kXMajor>::descriptor(x + group * 8192);
      const uint64_t b = Operand<Tile::kWMajor>::descriptor(x + Tile::kXBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<T, kN, Tile::kXMajor, Tile::kWMajor>::run(d, a + i * Operand<Tile::kXMajor>::kStep,
                                                        b + i * Operand<Tile::kWMajor>::kStep, i > 0 ? 1 : block);
      wgmma_commit();
      if (block > 0) {
        wgmma_wait<1>();
        if (leader) barrier_arrive(ring.empty + 8 * previous);
      }
      previous = ring.stage;
    }
    wgmma_wait<0>();
    if (leader && range.blocks > 0) barrier_arrive(ring.empty + 8 * previous);
    if (Tile::kRaggedK && range.blocks == 0) {
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) d[j] = 0.0f;
    }

    const int m0 = at.m + group * 64;
    finish_sums<T, kN, Tile::kActivate>(p, at.batch, m0, at.n, d);
    if constexpr (kStoreColumns<T, kN> == 0) {
      if (p.vector_stores)
        store_sums_turned<T, kN>(p, at.batch, m0, min(64, p.m - m0), at.n, d, buffers + (warp & 3) * kTurnBytes<kN>);
      else
        store_sums_directly<T, kN>(p, at.batch, m0, min(64, p.m - m0), at.n, d);
    } else if (p.out_float)
      store_sums<T, float, kN>(p, out_map, at.batch, m0, at.n, d, buffers, buffer, 1 + group);
    else
      store_sums<T, T, kN>(p, out_map, at.batch, m0, at.n, d, buffers, buffer, 1 + group);
  }
  if (leader) wait_stores_read<0>();  // the memory is read; the end of the kernel waits for the writes
}

template <class Tile>
void run_prefill(const Matmul& a, [[maybe_unused]] const MoeTile* ranges = nullptr) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(prefill_kernel<Tile>, Tile::kBytes, allowed);
  Product p = product_of(a);
  p.row_group = a.m >= 8192 ? 16 : 8;
  p.ranges = ranges;
  const auto map = [&](const void* data, Major major, int64_t rows, int64_t row, int64_t k, int64_t batch_stride,
                       int box) {
    const bool batched = a.batch > 1 && batch_stride != 0;
    const MapDimension batch{batched ? a.batch : 1, batched ? batch_stride : 64, 1};
    return major == Major::kK ? tensor_map(data, a.dtype, {{a.k, 1, 64}, {rows, row, box}, batch})
                              : tensor_map(data, a.dtype, {{rows, 1, 64}, {a.k, k, 64}, batch});
  };
  const CUtensorMap x = map(a.x, Tile::kXMajor, a.m, a.x_row, a.x_k, a.x_batch, Tile::kM);
  const CUtensorMap w = map(a.w, Tile::kWMajor, a.n, a.w_row, a.w_k, a.w_batch, Tile::kN);
  const int columns = p.out_float ? kStoreColumns<float, Tile::kN> : kStoreColumns<typename Tile::T, Tile::kN>;
  const CUtensorMap out =
      p.copy_stores && columns > 0
          ? tensor_map(a.out, a.out_dtype,
                       {{a.n, 1, columns}, {a.m, a.out_row, 64}, {a.batch, a.batch > 1 ? a.out_batch : 64, 1}})
          : x;  // not used
  const int64_t tiles = (a.m + Tile::kM - 1) / Tile::kM * ((a.n + Tile::kN - 1) / Tile::kN) * a.batch;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors()));
  launch(prefill_kernel<Tile>, {dim3(grid), Tile::kThreads, Tile::kBytes, 1, 1, a.frozen_weights}, a.stream, x, w, out,
         p);
}

}  // namespace quartz::kernels::cuda
