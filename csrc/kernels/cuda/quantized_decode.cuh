// Products of few rows with quantised weights: eight warps bring codes, decode them and lay 16-bit tiles into shared
// memory; one warpgroup multiplies. As in matmul_decode.cuh, x is the operand of 64 rows, of which kX are there, and a
// tile is kW rows of the weight; a stage is kBlocks blocks of 64 k.
//
// Each decoding thread copies the codes that it decodes itself, kDepth copies ahead, so that these need no barrier.
// x comes from shared memory through registers, which leaves shared memory's width to the weights.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_decode.cuh"
#include "kernels/cuda/moe_decode.cuh"
#include "kernels/cuda/quantized_codes.cuh"
#include "kernels/quantized_cuda.h"

namespace quartz::kernels::cuda {

// Where the codes and scales of a weight lie, as the kernel wants them.
struct QuantizedOperand {
  QuantizedWeight w;
  const uint8_t* scales_end;              // behind the last scale of all
  int block_row_bits, block_column_bits;  // fp8: a scale covers 2^bits
  int k;
};

struct QuantizedProduct {
  Product product;  // of one matrix
  MoeProduct moe;   // of experts
  QuantizedOperand w;
  const float* x_scales;
};

// kExperts: the tiles come from the tables of the experts layer, and rows of x are sorted by expert.
template <class T_, WeightFormat kFormat_, int kW_, int kX_, int kStages_, int kBlocks_, int kDepth_,
          bool kExperts_ = false, MoeGates kGates_ = MoeGates::kNone, int kDecoders_ = 256>
struct QuantizedTile {
  using T = T_;
  static constexpr WeightFormat kFormat = kFormat_;
  static constexpr int kW = kW_, kX = kX_, kStages = kStages_, kBlocks = kBlocks_, kDepth = kDepth_;
  static constexpr bool kExperts = kExperts_;
  static constexpr MoeGates kGates = kGates_;
  static constexpr int kOutColumns = kGates == MoeGates::kNone ? kW : kW / 2;
  static constexpr int kDecoders = kDecoders_, kThreads = 128 + kDecoders + 32;
  static constexpr int kSegments = kBlocks * 64 / kUnit<kFormat>;   // units of a row of a stage
  static constexpr int kRounds = kW * kSegments / kDecoders;        // units of a thread of a stage
  static constexpr int kRowStep = 8 * (kDecoders / 8 / kSegments);  // rows from one unit of a thread to its next
  static constexpr int kWBytes = kW * kSwizzleRow, kXBytes = kX * kSwizzleRow;
  static constexpr int kStageBytes = kBlocks * (kWBytes + kXBytes);
  static constexpr int kCodes = kStages * kStageBytes, kScales = kCodes + kDepth * kDecoders * 16;
  static constexpr int kBarriers = kScales + kDepth * kDecoders * 4;
  static constexpr int kBytes = kBarriers + 16 * kStages + 1024;
  static_assert(kRounds * kDecoders == kW * kSegments && kDecoders / 8 % kSegments == 0 && kBlocks % 2 == 0);
  static_assert(kX % 16 == 0 && kBytes <= kSharedBytes);
};

// Row r of a tile as a row of the weight; -1 outside.
template <class Tile>
QUARTZ_DEVICE int weight_row(const QuantizedProduct& p, int panel, int r) {
  if constexpr (Tile::kGates == MoeGates::kHalves) {
    constexpr int kHalf = Tile::kW / 2;
    const bool up = r >= kHalf;
    const int column = panel * kHalf + (up ? r - kHalf : r);
    return column < p.moe.out_width ? column + (up ? p.moe.out_width : 0) : -1;
  } else {
    const int row = panel * Tile::kW + r;
    return row < (Tile::kExperts ? p.moe.columns : p.product.n) ? row : -1;
  }
}

QUARTZ_DEVICE void copy_16_bytes(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
QUARTZ_DEVICE void copy_4_bytes(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
QUARTZ_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
QUARTZ_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8 x 8 matrices of 16 bits; lane i gives the address of row i % 8 of matrix i / 8.
QUARTZ_DEVICE void load_matrices(uint32_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// One of the decoding threads: which units it has, and their copies in flight.
template <class Tile>
class Decoder {
 public:
  static constexpr WeightFormat kFormat = Tile::kFormat;
  static constexpr int kUnitCodes = kUnit<kFormat>;

  QUARTZ_DEVICE Decoder(const QuantizedProduct& p, uint32_t base, int thread)
      : p_(p),
        codes_(base + Tile::kCodes + thread * 16),
        scales_(base + Tile::kScales + thread * 4),
        row_((thread & 7) + 8 * ((thread >> 3) / Tile::kSegments)),
        segment_((thread >> 3) % Tile::kSegments) {}

  // Starts the copy of unit `round` of a stage into slot `slot`.
  QUARTZ_DEVICE void fetch(int expert, int panel, int step, int round, int slot) const {
    const QuantizedWeight& w = p_.w.w;
    const int row = weight_row<Tile>(p_, panel, row_ + round * Tile::kRowStep);
    const int k = step * (Tile::kBlocks * 64) + segment_ * kUnitCodes;
    const bool there = row >= 0 && k < p_.w.k;
    const uint8_t* codes = w.codes;
    if (there) codes += expert * w.codes_batch + row * w.codes_row + (kFormat == WeightFormat::kFp8 ? k : k / 2);
    copy_16_bytes(codes_ + slot * (Tile::kDecoders * 16), codes, there);
    const uint32_t to = scales_ + slot * (Tile::kDecoders * 4);
    if constexpr (kFormat == WeightFormat::kFp8) {
      if (w.scales != nullptr) {
        const float* scales = static_cast<const float*>(w.scales);
        if (there)
          scales +=
              expert * w.scales_batch + (row >> p_.w.block_row_bits) * w.scales_row + (k >> p_.w.block_column_bits);
        copy_4_bytes(to, scales, there ? 4 : 0);
      }
    } else {
      const uint8_t* scales = static_cast<const uint8_t*>(w.scales);
      int bytes = 0;
      if (there) {  // the aligned word that holds them
        scales += (expert * w.scales_batch + row * w.scales_row + k / (kFormat == WeightFormat::kNvFp4 ? 16 : 32)) &
                  ~int64_t{3};
        bytes = static_cast<int>(min(p_.w.scales_end - scales, int64_t{4}));
      }
      copy_4_bytes(to, scales, bytes);
    }
  }

  // Decodes the unit in slot `slot` into the stage's tile at `tile`.
  QUARTZ_DEVICE void decode(int expert, int panel, int step, int round, int slot, uint32_t tile) const {
    using T = typename Tile::T;
    uint4 codes;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                 : "r"(codes_ + slot * (Tile::kDecoders * 16)));
    uint32_t scales = 0;
    const bool scaled = kFormat != WeightFormat::kFp8 || p_.w.w.scales != nullptr;
    if (scaled) scales = load_shared<uint32_t>(scales_ + slot * (Tile::kDecoders * 4));
    const int row = row_ + round * Tile::kRowStep;
    if constexpr (kFormat == WeightFormat::kNvFp4) scales >>= segment_ % 2 * 16;
    if constexpr (kFormat == WeightFormat::kMxFp4) {
      const QuantizedWeight& w = p_.w.w;
      const uint32_t place =
          static_cast<uint32_t>(expert) * static_cast<uint32_t>(w.scales_batch) +
          static_cast<uint32_t>(weight_row<Tile>(p_, panel, row)) * static_cast<uint32_t>(w.scales_row) +
          static_cast<uint32_t>(step * (Tile::kBlocks * 2) + segment_);
      scales = scales >> ((place & 3) * 8) & 0xff;
    }
    uint32_t out[kUnitCodes / 2];
    decode_unit<T, kFormat>(codes, scales, scaled, out);
    const int first = segment_ * kUnitCodes, block = first / 64, chunk = first % 64 / 8;
    const uint32_t to = tile + block * Tile::kWBytes + row * kSwizzleRow;
#pragma unroll
    for (int i = 0; i < kUnitCodes / 8; ++i)
      asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(to + (((chunk + i) ^ (row & 7)) << 4)),
                   "r"(out[4 * i]), "r"(out[4 * i + 1]), "r"(out[4 * i + 2]), "r"(out[4 * i + 3])
                   : "memory");
  }

 private:
  const QuantizedProduct& p_;
  uint32_t codes_, scales_;
  int row_, segment_;
};

// The sums times the scales of their columns and rows.
template <class Tile>
QUARTZ_DEVICE void scale_sums(const QuantizedProduct& p, int expert, int panel, int m0, float (&d)[Tile::kW / 2]) {
  const QuantizedWeight& w = p.w.w;
  const LaneRows lane;
  if (w.outer != nullptr) {
    const float* const outer = w.outer + expert * w.outer_batch;
    const float all = *outer;
#pragma unroll
    for (int j = 0; j < Tile::kW / 4; ++j) {
      float scale = all;
      if (w.outer_row != 0) {
        const int row = weight_row<Tile>(p, panel, lane.column + j / 2 * 8 + j % 2);
        scale = row < 0 ? 0.0f : outer[row * w.outer_row];
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) d[j / 2 * 4 + 2 * h + j % 2] = __fmul_rn(d[j / 2 * 4 + 2 * h + j % 2], scale);
    }
  }
  if (p.x_scales == nullptr) return;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float scale = p.x_scales[min(m0 + lane.row + 8 * h, p.product.m - 1)];
#pragma unroll
    for (int j = 0; j < Tile::kW / 4; ++j)
      d[j / 2 * 4 + 2 * h + j % 2] = __fmul_rn(d[j / 2 * 4 + 2 * h + j % 2], scale);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    quantized_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ QuantizedProduct p) {
  using T = typename Tile::T;
  constexpr int kBlocks = Tile::kBlocks, kStages = Tile::kStages, kW = Tile::kW;
  const uint32_t base = shared_address(aligned_shared());
  Ring ring(base + Tile::kBarriers, kStages);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(ring.full + 8 * i, 1 + Tile::kDecoders / 32);
      barrier_init(ring.empty + 8 * i, 1);
    }
    barrier_init_done();
  }
  __syncthreads();
  // The tables and x are written by the kernels before; weights that are frozen are not.
  const bool frozen = Tile::kExperts ? p.moe.frozen_weights : p.product.frozen_weights;
  if (Tile::kExperts || !frozen) wait_for_previous_kernel();
  let_next_kernel_start();

  struct Place {
    int expert, panel, row, rows;
  };
  const MoeTile* const table = Tile::kGates == MoeGates::kNone ? p.moe.tables.down_tiles : p.moe.tables.up_tiles;
  const int columns = Tile::kExperts ? p.moe.out_width : p.product.n;
  const int panels = (columns + Tile::kOutColumns - 1) / Tile::kOutColumns;
  const int row_tiles =
      Tile::kExperts
          ? *reinterpret_cast<volatile const int*>(p.moe.tables.counts + (Tile::kGates == MoeGates::kNone ? 1 : 0))
          : (p.product.m + Tile::kX - 1) / Tile::kX;
  const int tiles = row_tiles * panels, k_blocks = Tile::kExperts ? p.moe.k_blocks : p.product.k_blocks;
  const int steps = (k_blocks + kBlocks - 1) / kBlocks;
  const auto place = [&](int t) {
    if constexpr (Tile::kExperts) {
      const MoeTile tile = table[t / panels];
      return Place{tile.expert, t % panels, tile.row, tile.rows};
    } else {
      const int row = t % row_tiles * Tile::kX;
      return Place{0, t / row_tiles, row, min(Tile::kX, p.product.m - row)};
    }
  };
  const int first = blockIdx.x, stride = gridDim.x;

  if (threadIdx.x >= 128 + Tile::kDecoders) {  // copies of x
    if (threadIdx.x != 128 + Tile::kDecoders) return;
    wait_for_previous_kernel();
    const uint64_t again = evict_last_policy();
    for (int t = first; t < tiles; t += stride) {
      const Place at = place(t);
      for (int step = 0; step < steps; ++step, ring.next()) {
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
        barrier_expect(ring.full_barrier(), kBlocks * Tile::kXBytes);
        copy_4d(base + ring.stage * Tile::kStageBytes, x_map, 0, at.row, step * kBlocks, 0, ring.full_barrier(), again);
      }
    }
    return;
  }

  if (threadIdx.x >= 128) {  // decoding
    const Decoder<Tile> decoder(p, base, threadIdx.x - 128);
    // What is fetched next, kDepth units ahead of what is decoded.
    int next_tile = first, next_step = 0, next_round = 0, slot = 0;
    Place next = first < tiles ? place(first) : Place{};
    const auto fetch = [&](int to) {
      if (next_tile < tiles) {
        decoder.fetch(next.expert, next.panel, next_step, next_round, to);
        if (++next_round == Tile::kRounds) {
          next_round = 0;
          if (++next_step == steps) {
            next_step = 0;
            next_tile += stride;
            if (next_tile < tiles) next = place(next_tile);
          }
        }
      }
      commit_copies();
    };
    for (int i = 0; i < Tile::kDepth - 1; ++i) fetch(i);
    for (int t = first; t < tiles; t += stride) {
      const Place at = place(t);
      for (int step = 0; step < steps; ++step, ring.next()) {
        const uint32_t tile = base + ring.stage * Tile::kStageBytes + kBlocks * Tile::kXBytes;
        barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
#pragma unroll
        for (int round = 0; round < Tile::kRounds; ++round) {
          fetch(slot == 0 ? Tile::kDepth - 1 : slot - 1);
          wait_copies<Tile::kDepth - 1>();
          decoder.decode(at.expert, at.panel, step, round, slot, tile);
          slot = slot + 1 == Tile::kDepth ? 0 : slot + 1;
        }
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(ring.full_barrier());
      }
    }
    return;
  }

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int x_row = warp * 16 + (lane & 15);
  for (int t = first; t < tiles; t += stride) {
    const Place at = place(t);
    float d[kW / 2];
    uint32_t a[2][4][4] = {};
    int previous = 0;
    for (int step = 0; step < steps; ++step, ring.next()) {
      barrier_wait(ring.full_barrier(), ring.parity);
      // The decoded tile was written by ordinary stores. The fence stands here and not behind those: there it would
      // wait for the copies that the decoding threads have in flight.
      fence_shared_writes();
      const uint32_t x = base + ring.stage * Tile::kStageBytes, w = x + kBlocks * Tile::kXBytes;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t(&rows)[4][4] = a[block % 2];
        if (warp * 16 < Tile::kX) {  // the rows of the other warps stay zero
#pragma unroll
          for (int i = 0; i < 4; ++i)
            load_matrices(
                x + block * Tile::kXBytes + x_row * kSwizzleRow + (((2 * i + (lane >> 4)) ^ (x_row & 7)) << 4),
                rows[i]);
        }
        const uint64_t b = Operand<Major::kK>::descriptor(w + block * Tile::kWBytes);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
          WgmmaFromRegisters<T, kW>::run(d, rows[i], b + i * Operand<Major::kK>::kStep, block + i > 0 ? 1 : step);
        wgmma_commit();
        wgmma_wait<1>();
        if (block == 0 && step > 0 && threadIdx.x == 0) barrier_arrive(ring.empty + 8 * previous);
      }
      previous = ring.stage;
    }
    wgmma_wait<0>();
    if (threadIdx.x == 0) barrier_arrive(ring.empty + 8 * previous);

    scale_sums<Tile>(p, at.expert, at.panel, at.row, d);
    if constexpr (Tile::kExperts) {
      finish_moe_sums<Tile>(p.moe, at.expert, at.panel, d);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int m = warp * 16 + (lane >> 2) + 8 * h;
        if (m < at.rows) store_moe_row<Tile>(p.moe, int64_t{at.row} + m, at.panel, d, h);
      }
    } else {
      finish_sums<T, kW, true>(p.product, 0, at.row, at.panel * kW, d);
      store_sums_directly<T, kW>(p.product, 0, at.row, at.rows, at.panel * kW, d);
    }
  }
}

template <class Tile>
void run_quantized(const CUtensorMap& x, const QuantizedProduct& p, int64_t tiles, bool early, void* stream) {
  static std::atomic<uint64_t> allowed{0};
  allow_shared_bytes(quantized_kernel<Tile>, Tile::kBytes, allowed);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, multiprocessors()));
  launch(quantized_kernel<Tile>, {dim3(grid), Tile::kThreads, Tile::kBytes, 1, 1, early}, stream, x, p);
}

}  // namespace quartz::kernels::cuda
