// Which tiles serve a format; each file quantized_<format>.cu is an instance of this.
#pragma once

#include "kernels/cuda/quantized_kernels.h"

namespace quartz::kernels::cuda {
namespace {

// Blocks of 64 k in a stage: a unit for each of the 256 threads at least.
template <WeightFormat kFormat, int kW>
constexpr int kStageBlocks = kFormat != WeightFormat::kFp8&& kW == 16 ? 8 : 4;

template <class T, WeightFormat kFormat, int kX>
void by_width(const QuantizedMatmul& a, const QuantizedProduct& p) {
  const Matmul& m = a.product;
  const auto run = [&](auto tile) {
    using Tile = decltype(tile);
    const int64_t tiles = (m.m + Tile::kX - 1) / Tile::kX * ((m.n + Tile::kW - 1) / Tile::kW);
    run_quantized<Tile>(decode_map(m.x, m.dtype, 1, m.m, m.k, 0, m.x_row, Tile::kX, Tile::kBlocks), p, tiles,
                        m.frozen_weights, m.stream);
  };
  // The width whose waves of tiles bring the fewest columns to the busiest multiprocessor.
  const auto columns = [&](int width) {
    const int64_t tiles = (m.m + kX - 1) / kX * ((m.n + width - 1) / width), blocks = multiprocessors();
    return (tiles + blocks - 1) / blocks * width;
  };
  constexpr int kStages = kX == 16 ? 3 : 2;
  const int64_t narrow = columns(32), middle = columns(64), wide = columns(96);
  if (narrow < middle && narrow < wide) return run(QuantizedTile<T, kFormat, 32, kX, kStages, 4, 8>{});
  if (middle < wide) return run(QuantizedTile<T, kFormat, 64, kX, kStages, 4, 8>{});
  run(QuantizedTile<T, kFormat, 96, kX, 2, 4, 8>{});
}

template <class T, WeightFormat kFormat>
void by_rows(const QuantizedMatmul& a) {
  QuantizedProduct p{};
  p.product = product_of(a.product);
  operand_of(a.w, 1, a.product.n, a.product.k, p.w);
  p.x_scales = a.x_scales;
  if (a.product.m <= 16) return by_width<T, kFormat, 16>(a, p);
  by_width<T, kFormat, 64>(a, p);
}

template <class T, WeightFormat kFormat, int kX>
void moe_by_rows(const QuantizedMoe& a, const MoeProducts& given) {
  const auto run = [&](auto tile, const MoeProduct& moe, const QuantizedOperand& w, const void* rows, int64_t k) {
    using Tile = decltype(tile);
    QuantizedProduct p{};
    p.moe = moe;
    p.w = w;
    run_quantized<Tile>(moe_k_major_map(rows, a.layer.dtype, 1, given.pairs, k, k, Tile::kX, Tile::kBlocks), p,
                        multiprocessors(), kMoeEarly, a.layer.stream);
  };
  constexpr int kStages = kX == 16 ? 3 : 2;
  if (a.layer.interleaved)
    run(QuantizedTile<T, kFormat, 64, kX, kStages, 4, 8, true, MoeGates::kAlternating>{}, given.up, given.up_w, given.x,
        a.layer.hidden);
  else
    run(QuantizedTile<T, kFormat, 64, kX, kStages, 4, 8, true, MoeGates::kHalves>{}, given.up, given.up_w, given.x,
        a.layer.hidden);
  run(QuantizedTile<T, kFormat, 64, kX, kStages, 4, 8, true, MoeGates::kNone>{}, given.down, given.down_w, given.h,
      a.layer.width);
}

template <class T, WeightFormat kFormat>
void moe_of(const QuantizedMoe& a, const MoeProducts& products) {
  if (products.few) return moe_by_rows<T, kFormat, kQuantizedFew>(a, products);
  moe_by_rows<T, kFormat, kQuantizedMany>(a, products);
}

}  // namespace

template <WeightFormat kFormat>
void quantized_matmul_of(const QuantizedMatmul& a) {
  if (a.product.dtype == DType::kBFloat16) return by_rows<BFloat16, kFormat>(a);
  by_rows<Float16, kFormat>(a);
}

template <WeightFormat kFormat>
void quantized_moe_of(const QuantizedMoe& a, const MoeProducts& products) {
  if (a.layer.dtype == DType::kBFloat16) return moe_of<BFloat16, kFormat>(a, products);
  moe_of<Float16, kFormat>(a, products);
}

}  // namespace quartz::kernels::cuda
