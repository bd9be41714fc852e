// The two grouped products of many rows an expert: tiles of 128 rows of one expert, as matmul_prefill.cuh. The rows of
// x are gathered by the first product itself; its tiles are given out by a counter, because experts differ in size.
#pragma once

#include "kernels/cuda/moe_decode.cuh"

namespace quartz::kernels::cuda {

QUARTZ_DEVICE void copy_16_bytes(uint32_t to, const void* from, bool inside) {  // zeros if outside
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}
// An arrival at the barrier once this thread's copies so far have come.
QUARTZ_DEVICE void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
QUARTZ_DEVICE void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The numbers of the block's tiles, handed from one thread to the 12 warps through a ring of four. Which block works on
// a tile does not touch its bits.
struct TileQueue {
  static constexpr int kSlots = 4, kReaders = 12;
  uint32_t full, empty;
  volatile int* slots;

  QUARTZ_DEVICE void init() const {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kReaders);
    }
  }
  QUARTZ_DEVICE void put(int n, int* counter) const {
    const int slot = n % kSlots;
    barrier_wait(empty + 8 * slot, (n / kSlots & 1) ^ 1);
    slots[slot] = atomicAdd(counter, 1);
    barrier_arrive(full + 8 * slot);
  }
  QUARTZ_DEVICE int get(int n) const {
    const int slot = n % kSlots;
    barrier_wait(full + 8 * slot, n / kSlots & 1);
    const int tile = slots[slot];
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(empty + 8 * slot);
    return tile;
  }
};

template <class T_, int kW_, int kStages_, Major kMajor_, MoeGates kGates_, int kSkew_>
struct MoeUpTile {
  using T = T_;
  static constexpr int kM = 128, kW = kW_, kOutColumns = kW / 2, kStages = kStages_, kBlocks = 1;
  static constexpr Major kMajor = kMajor_;
  static constexpr int kSkew = kSkew_;
  static constexpr MoeGates kGates = kGates_;
  static constexpr int kXBytes = kM * kSwizzleRow, kWBytes = kW * kSwizzleRow, kStageBytes = kXBytes + kWBytes;
  static constexpr int kBarriers = kStages * kStageBytes, kQueue = kBarriers + 16 * kStages;
  static constexpr int kBytes = kQueue + 16 * TileQueue::kSlots + 16 + 1024;
  static constexpr int kThreads = 384;
  static_assert(kBytes <= kSharedBytes);
};

// x of token t at x + t * x_row.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    moe_up_kernel(const __grid_constant__ CUtensorMap w_map, const void* x, int64_t x_row,
                  const __grid_constant__ MoeProduct p) {
  using T = typename Tile::T;
  constexpr int kW = Tile::kW;
  uint8_t* const shared = aligned_shared();
  const uint32_t base = shared_address(shared);
  Ring ring(base + Tile::kBarriers, Tile::kStages);
  const TileQueue queue{base + Tile::kQueue, base + Tile::kQueue + 8 * TileQueue::kSlots,
                        reinterpret_cast<volatile int*>(shared + Tile::kQueue + 16 * TileQueue::kSlots)};
  if (threadIdx.x == 0) {
    queue.init();
    for (int i = 0; i < Tile::kStages; ++i) {
      barrier_init(ring.full + 8 * i, 129);  // 128 threads gather x, one copy brings w
      barrier_init(ring.empty + 8 * i, 2);
    }
    barrier_init_done();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int panels = (p.out_width + kW / 2 - 1) / (kW / 2);
  const int tiles = *reinterpret_cast<volatile const int*>(p.tables.counts) * panels;

  if (warp < 4) {
    give_registers<56>();
    int* const counter = p.tables.counts + 2;
    const int chunk = threadIdx.x & 7, first = threadIdx.x >> 3;  // 16 bytes of every 16th row
    const uint32_t to = base + first * kSwizzleRow + ((chunk ^ (first & 7)) << 4);
    if (threadIdx.x == 0) queue.put(0, counter);
    __syncwarp();
    for (int n = 0;; ++n) {
      if (threadIdx.x == 0) queue.put(n + 1, counter);
      __syncwarp();
      const int t = queue.get(n);
      if (t >= tiles) break;
      const auto [tile, panel] = moe_work(p.tables.up_tiles, panels, t);
      const uint16_t* rows[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = first + 16 * i;
        rows[i] = row < tile.rows ? static_cast<const uint16_t*>(x) +
                                        int64_t{p.tables.pair_of[tile.row + row] / p.k} * x_row + chunk * 8
                                  : nullptr;
      }
      for (int block = 0; block < p.k_blocks; ++block, ring.next()) {
        const uint32_t full = ring.full_barrier(), stage = ring.stage * Tile::kStageBytes;
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        if (threadIdx.x == 0) {
          barrier_expect(full, Tile::kWBytes);
          const uint32_t w = base + stage + Tile::kXBytes;
          if constexpr (Tile::kMajor == Major::kMN) {
            for (int j = 0; j < kW / 64; ++j)
              copy_3d(w + j * 8192, w_map, panel * kW + j * 64, block * 64, tile.expert, full);
          } else if constexpr (Tile::kGates == MoeGates::kHalves) {
            copy_3d(w, w_map, block * 64, panel * (kW / 2), tile.expert, full);
            copy_3d(w + Tile::kWBytes / 2, w_map, block * 64, p.out_width + panel * (kW / 2), tile.expert, full);
          } else {
            copy_3d(w, w_map, block * 64, panel * kW, tile.expert, full);
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          copy_16_bytes(to + stage + i * 16 * kSwizzleRow, rows[i] != nullptr ? rows[i] + block * 64 : x,
                        rows[i] != nullptr);
        arrive_after_copies(full);
      }
    }
    wait_copies();
    return;
  }

  take_registers<224>();
  const int group = (warp >> 2) - 1;
  const bool leader = (threadIdx.x & 127) == 0;
  for (int n = 0;; ++n) {
    const int t = queue.get(n);
    if (t >= tiles) break;
    const auto [tile, panel] = moe_work(p.tables.up_tiles, panels, t);
    if (group * 64 >= tile.rows) {  // no rows for this warpgroup: the barrier keeps its warps within one phase
      for (int block = 0; block < p.k_blocks; ++block, ring.next()) {
        if (Tile::kSkew > 0 && n == 0) skew_warpgroups<Tile::kSkew>(group, block, p.k_blocks);
        barrier_wait(ring.full_barrier(), ring.parity);
        named_barrier(1 + group, 128);
        if (leader) barrier_arrive(ring.empty_barrier());
      }
      continue;
    }
    float d[kW / 2];
    int previous = 0;
    for (int block = 0; block < p.k_blocks; ++block, ring.next()) {
      if (Tile::kSkew > 0 && n == 0) skew_warpgroups<Tile::kSkew>(group, block, p.k_blocks);
      barrier_wait(ring.full_barrier(), ring.parity);
      fence_shared_writes();  // the gathered rows were written by threads, not by the copy engine
      const uint32_t x_tile = base + ring.stage * Tile::kStageBytes;
      const uint64_t a = Operand<Major::kK>::descriptor(x_tile + group * 8192);
      const uint64_t b = Operand<Tile::kMajor>::descriptor(x_tile + Tile::kXBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<T, kW, Major::kK, Tile::kMajor>::run(d, a + i * Operand<Major::kK>::kStep,
                                                   b + i * Operand<Tile::kMajor>::kStep, i > 0 ? 1 : block);
      wgmma_commit();
      if (block > 0) {
        wgmma_wait<1>();
        if (leader) barrier_arrive(ring.empty + 8 * previous);
      }
      previous = ring.stage;
    }
    wgmma_wait<0>();
    if (leader) barrier_arrive(ring.empty + 8 * previous);

    finish_moe_sums<Tile>(p, tile.expert, panel, d);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int m = group * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * h;
      if (m >= tile.rows) continue;
      store_moe_row<Tile>(p, int64_t{tile.row} + m, panel, d, h);
    }
  }
}

template <class T_, int kW_, int kStages_, Major kMajor_, int kSkew_>
struct MoeDownTile {
  using T = T_;
  static constexpr int kM = 128, kW = kW_, kOutColumns = kW, kStages = kStages_, kBlocks = 1;
  static constexpr Major kMajor = kMajor_;
  static constexpr int kSkew = kSkew_;
  static constexpr MoeGates kGates = MoeGates::kNone;
  static constexpr int kXBytes = kM * kSwizzleRow, kWBytes = kW * kSwizzleRow, kStageBytes = kXBytes + kWBytes;
  static constexpr int kStores = kStages * kStageBytes, kStoreBytes = 64 * kW * 2;  // of a warpgroup
  static constexpr int kBarriers = kStores + 2 * kStoreBytes;
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static constexpr int kThreads = 384;
  static_assert(kBytes <= kSharedBytes && kW % 64 == 0);
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    moe_down_kernel(const __grid_constant__ CUtensorMap h_map, const __grid_constant__ CUtensorMap w_map,
                    const __grid_constant__ CUtensorMap out_map, const __grid_constant__ MoeProduct p) {
  using T = typename Tile::T;
  constexpr int kW = Tile::kW;
  const uint32_t base = shared_address(aligned_shared());
  Ring ring(base + Tile::kBarriers, Tile::kStages);
  if (threadIdx.x == 0) ring.init(2);
  __syncthreads();
  let_next_kernel_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int panels = (p.out_width + kW - 1) / kW;
  const int tiles = *reinterpret_cast<volatile const int*>(p.tables.counts) * panels;  // the tiles of the first product

  if (warp < 4) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    wait_for_previous_kernel();
    for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
      const auto [tile, panel] = moe_work(p.tables.up_tiles, panels, t);
      for (int block = 0; block < p.k_blocks; ++block, ring.next()) {
        const uint32_t x = base + ring.stage * Tile::kStageBytes, w = x + Tile::kXBytes, full = ring.full_barrier();
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        barrier_expect(full, Tile::kStageBytes);
        if constexpr (Tile::kMajor == Major::kK) {
          copy_3d(w, w_map, block * 64, panel * kW, tile.expert, full);
        } else {
          for (int j = 0; j < kW / 64; ++j)
            copy_3d(w + j * 8192, w_map, panel * kW + j * 64, block * 64, tile.expert, full);
        }
        copy_3d(x, h_map, block * 64, tile.row, 0, full);
      }
    }
    return;
  }

  take_registers<240>();
  const int group = (warp >> 2) - 1;
  const bool leader = (threadIdx.x & 127) == 0;
  const uint32_t buffer = base + Tile::kStores + group * Tile::kStoreBytes;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const auto [tile, panel] = moe_work(p.tables.up_tiles, panels, t);
    if (group * 64 >= tile.rows) {  // as in the first product
      for (int block = 0; block < p.k_blocks; ++block, ring.next()) {
        if (Tile::kSkew > 0 && t == static_cast<int>(blockIdx.x))
          skew_warpgroups<Tile::kSkew>(group, block, p.k_blocks);
        barrier_wait(ring.full_barrier(), ring.parity);
        named_barrier(1 + group, 128);
        if (leader) barrier_arrive(ring.empty_barrier());
      }
      continue;
    }
    float d[kW / 2];
    int previous = 0;
    for (int block = 0; block < p.k_blocks; ++block, ring.next()) {
      if (Tile::kSkew > 0 && t == static_cast<int>(blockIdx.x)) skew_warpgroups<Tile::kSkew>(group, block, p.k_blocks);
      barrier_wait(ring.full_barrier(), ring.parity);
      const uint32_t x = base + ring.stage * Tile::kStageBytes;
      const uint64_t a = Operand<Major::kK>::descriptor(x + group * 8192);
      const uint64_t b = Operand<Tile::kMajor>::descriptor(x + Tile::kXBytes);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        Wgmma<T, kW, Major::kK, Tile::kMajor>::run(d, a + i * Operand<Major::kK>::kStep,
                                                   b + i * Operand<Tile::kMajor>::kStep, i > 0 ? 1 : block);
      wgmma_commit();
      if (block > 0) {
        wgmma_wait<1>();
        if (leader) barrier_arrive(ring.empty + 8 * previous);
      }
      previous = ring.stage;
    }
    wgmma_wait<0>();
    if (leader) barrier_arrive(ring.empty + 8 * previous);

    finish_moe_sums<Tile>(p, tile.expert, panel, d);
    if (tile.rows < (group + 1) * 64) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int m = group * 64 + (warp & 3) * 16 + (lane >> 2) + 8 * h;
        if (m >= tile.rows) continue;
        store_moe_row<Tile>(p, int64_t{tile.row} + m, panel, d, h);
      }
      continue;
    }
    // 64 whole rows: through shared memory, by the copy engine.
    if (leader) wait_stores_read<0>();
    named_barrier(1 + group, 128);
    const int store_row = (warp & 3) * 16 + (lane & 15), half = lane >> 4;
#pragma unroll
    for (int j = 0; j < kW / 8; j += 2) {
      const float* v = d + 4 * j;
      store_matrices(buffer + j / 8 * 8192 + store_row * kSwizzleRow + ((((j & 7) + half) ^ (store_row & 7)) << 4),
                     pack<T>(v[0], v[1]), pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
    }
    fence_shared_writes();
    named_barrier(1 + group, 128);
    if (leader) {
      for (int j = 0; j < kW / 64; ++j)
        store_3d(out_map, panel * kW + j * 64, tile.row + group * 64, 0, buffer + j * 8192);
      commit_stores();
    }
  }
  if (leader) wait_stores_read<0>();
}

// [matrices, rows, k] for copies of one block of 64 k.
inline CUtensorMap moe_map_3d(const void* data, DType dtype, int64_t matrices, int64_t rows, int64_t row_stride,
                              int64_t k, int box) {
  return tensor_map(data, dtype, {{k, 1, 64}, {rows, row_stride, box}, {matrices, matrices > 1 ? rows * k : 64, 1}});
}

template <class Tile>
CUtensorMap moe_prefill_weight_map(const void* data, DType dtype, int64_t experts, int64_t columns, int64_t k) {
  if (Tile::kMajor == Major::kMN) return moe_weight_map<Tile>(data, dtype, experts, columns, k);
  return moe_map_3d(data, dtype, experts, columns, k, k, Tile::kGates == MoeGates::kHalves ? Tile::kW / 2 : Tile::kW);
}

template <class Tile>
void run_moe_up(const MoeExperts& a, const MoeProduct& p) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(moe_up_kernel<Tile>, Tile::kBytes, allowed);
  launch(moe_up_kernel<Tile>,
         {dim3(static_cast<unsigned>(multiprocessors())), Tile::kThreads, Tile::kBytes, 1, 1, kMoeEarly}, a.stream,
         moe_prefill_weight_map<Tile>(a.up, a.dtype, a.experts, p.columns, a.hidden), a.x, a.x_row, p);
}

// h: [rows, k], rows h_row apart.
template <class Tile>
void run_moe_down(const void* h, int64_t h_row, const void* w, DType dtype, int64_t rows, int64_t k,
                  const MoeProduct& p, void* stream) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(moe_down_kernel<Tile>, Tile::kBytes, allowed);
  launch(moe_down_kernel<Tile>,
         {dim3(static_cast<unsigned>(multiprocessors())), Tile::kThreads, Tile::kBytes, 1, 1, p.early}, stream,
         moe_map_3d(h, dtype, 1, rows, h_row, k, Tile::kM),
         moe_prefill_weight_map<Tile>(w, dtype, p.experts, p.columns, k),
         moe_map_3d(p.out, dtype, 1, rows, p.out_width, p.out_width, 64), p);
}

}  // namespace quartz::kernels::cuda
