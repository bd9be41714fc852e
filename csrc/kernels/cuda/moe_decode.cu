#include "kernels/cuda/moe_decode.cuh"

#include "kernels/cuda/moe_kernels.h"

namespace quartz::kernels::cuda {
namespace {

template <class Up, class Down>
void run(const MoeExperts& a, const MoePlan& plan) {
  const bool sorted = plan.kind == MoePlan::Kind::kSorted;
  run_moe_decode<Up>(moe_k_major_map(sorted ? plan.sorted_x : a.x, a.dtype, 1, sorted ? plan.pairs : a.tokens, a.hidden,
                                     sorted ? a.hidden : a.x_row, Up::kX, Up::kBlocks),
                     moe_weight_map<Up>(a.up, a.dtype, a.experts, plan.up.columns, a.hidden), plan.up, a.stream);
  run_moe_decode<Down>(moe_k_major_map(plan.h, a.dtype, 1, plan.pairs, a.width, a.width, Down::kX, Down::kBlocks),
                       moe_weight_map<Down>(a.down, a.dtype, a.experts, plan.down.columns, a.width), plan.down,
                       a.stream);
}

template <class T>
void k_major(const MoeExperts& a, const MoePlan& plan) {
  constexpr auto kK = Major::kK;
  constexpr auto kUp = MoeGates::kHalves, kDown = MoeGates::kNone;
  switch (plan.kind) {
    case MoePlan::Kind::kFew:
      return run<MoeDecodeTile<T, 96, 8, 4, 4, kK, kUp, true, true>,
                 MoeDecodeTile<T, 128, 8, 6, 2, kK, kDown, false, true>>(a, plan);
    case MoePlan::Kind::kWholeBatch: {
      using Up = MoeDecodeTile<T, 192, 64, 6, 1, kK, kUp, true>;
      if (plan.caps.down == 16) return run<Up, MoeDecodeTile<T, 256, 16, 3, 2, kK, kDown, false>>(a, plan);
      return run<Up, MoeDecodeTile<T, 256, 32, 6, 1, kK, kDown, false>>(a, plan);
    }
    default:
      return run<MoeDecodeTile<T, 192, 32, 7, 1, kK, kUp, false>, MoeDecodeTile<T, 256, 32, 6, 1, kK, kDown, false>>(
          a, plan);
  }
}

template <class T>
void transposed(const MoeExperts& a, const MoePlan& plan) {
  constexpr auto kMN = Major::kMN;
  constexpr auto kUp = MoeGates::kAlternating, kDown = MoeGates::kNone;
  switch (plan.kind) {
    case MoePlan::Kind::kFew:
      return run<MoeDecodeTile<T, 128, 8, 6, 2, kMN, kUp, true, true>,
                 MoeDecodeTile<T, 128, 8, 6, 2, kMN, kDown, false, true>>(a, plan);
    case MoePlan::Kind::kWholeBatch: {
      using Up = MoeDecodeTile<T, 192, 64, 6, 1, kMN, kUp, true>;
      if (plan.caps.down == 16) return run<Up, MoeDecodeTile<T, 192, 16, 3, 2, kMN, kDown, false>>(a, plan);
      return run<Up, MoeDecodeTile<T, 192, 32, 7, 1, kMN, kDown, false>>(a, plan);
    }
    default:
      return run<MoeDecodeTile<T, 192, 32, 7, 1, kMN, kUp, false>, MoeDecodeTile<T, 192, 32, 7, 1, kMN, kDown, false>>(
          a, plan);
  }
}

template <class T>
void products(const MoeExperts& a, const MoePlan& plan) {
  if (a.transposed) return transposed<T>(a, plan);
  k_major<T>(a, plan);
}

}  // namespace

void moe_products_decode(const MoeExperts& a, const MoePlan& plan) {
  if (a.dtype == DType::kBFloat16) return products<BFloat16>(a, plan);
  products<Float16>(a, plan);
}

void moe_down_decode(const void* h, int64_t h_row, const void* w, DType dtype, bool k_major, int64_t rows, int64_t k,
                     const MoeProduct& p, void* stream) {
  const auto run = [&](auto tile) {
    using Tile = decltype(tile);
    run_moe_decode<Tile>(moe_k_major_map(h, dtype, 1, rows, k, h_row, Tile::kX, Tile::kBlocks),
                         moe_weight_map<Tile>(w, dtype, p.experts, p.columns, k), p, stream);
  };
  constexpr auto kNone = MoeGates::kNone;
  if (dtype == DType::kBFloat16) {
    if (k_major) return run(MoeDecodeTile<BFloat16, 256, 32, 6, 1, Major::kK, kNone, false>{});
    return run(MoeDecodeTile<BFloat16, 192, 32, 7, 1, Major::kMN, kNone, false>{});
  }
  if (k_major) return run(MoeDecodeTile<Float16, 256, 32, 6, 1, Major::kK, kNone, false>{});
  run(MoeDecodeTile<Float16, 192, 32, 7, 1, Major::kMN, kNone, false>{});
}

}  // namespace quartz::kernels::cuda
