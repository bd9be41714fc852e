// order -> (gather) -> first product with the gate -> second product -> combine. Up to kFewPairs pairs the products
// find the order themselves; up to 64 tokens the first product reads the batch as it is; prefill gathers while it
// copies.
#include <climits>
#include <cmath>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/moe_kernels.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kGatherThreads = 256, kCombineThreads = 128;

// Row r of `rows` is x of the token of pair r; 16 bytes a step.
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const uint16_t* x, int64_t x_row, uint16_t* rows, MoeTables tables, int k, int hidden) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const MoeTile last = tables.up_tiles[max(tables.counts[0] - 1, 0)];
  const int row = blockIdx.x;
  if (tables.counts[0] == 0 || row >= last.row + last.rows) return;
  const auto* from = reinterpret_cast<const uint4*>(x + int64_t{tables.pair_of[row] / k} * x_row);
  auto* to = reinterpret_cast<uint4*>(rows + int64_t{row} * hidden);
  for (int i = threadIdx.x; i < hidden / 8; i += kGatherThreads) to[i] = from[i];
}

template <class T>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const T* o, const int* row_of, const float* weights, T* y, int k, int hidden) {
  __shared__ int rows[kMaxPairsOfToken];
  __shared__ float factors[kMaxPairsOfToken];
  __shared__ int used;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int64_t token = blockIdx.x;
  const int j = threadIdx.x;
  if (j == 0) used = 0;
  __syncthreads();
  if (j < k) {  // ascending rows are ascending experts, and slots where those are equal
    const int row = row_of[token * k + j];
    int place = 0;
    for (int i = 0; i < k; ++i) {
      const int other = row_of[token * k + i];
      place += other >= 0 && other < row;
    }
    if (row >= 0) {
      rows[place] = row;
      factors[place] = weights[token * k + j];
      atomicAdd(&used, 1);
    }
  }
  __syncthreads();
  const int column = (blockIdx.y * kCombineThreads + threadIdx.x) * 8;
  if (column >= hidden) return;
  float sums[8] = {};
  const int n = used;
#pragma unroll 8
  for (int i = 0; i < n; ++i) {
    const uint4 bits = *reinterpret_cast<const uint4*>(o + int64_t{rows[i]} * hidden + column);
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sums[2 * q] = __fmaf_rn(factors[i], to_float(T{static_cast<uint16_t>(words[q])}), sums[2 * q]);
      sums[2 * q + 1] = __fmaf_rn(factors[i], to_float(T{static_cast<uint16_t>(words[q] >> 16)}), sums[2 * q + 1]);
    }
  }
  *reinterpret_cast<uint4*>(y + token * hidden + column) = make_uint4(
      pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3]), pack<T>(sums[4], sums[5]), pack<T>(sums[6], sums[7]));
}

template <class T>
void combine_as(const MoeExperts& a, const MoePlan& plan) {
  const auto parts = static_cast<unsigned>((a.hidden + 8 * kCombineThreads - 1) / (8 * kCombineThreads));
  launch(combine_kernel<T>, {dim3(static_cast<unsigned>(a.tokens), parts), kCombineThreads, 0, 1, 1, kMoeEarly},
         a.stream, static_cast<const T*>(plan.o), plan.tables.row_of, a.weights, static_cast<T*>(a.y),
         static_cast<int>(a.k), static_cast<int>(a.hidden));
}

// By speed only: the bits are the same.
MoePlan::Kind kind_of(const MoeExperts& a) {
  const int64_t pairs = a.tokens * a.k;
  if (a.tokens <= 8 && pairs <= kFewPairs) return MoePlan::Kind::kFew;
  if (a.tokens <= 64 && pairs <= 24 * a.experts) return MoePlan::Kind::kWholeBatch;
  if (pairs <= 20 * a.experts) return MoePlan::Kind::kSorted;
  return MoePlan::Kind::kPrefill;
}

MoeCaps caps_of(const MoeExperts& a, MoePlan::Kind kind) {
  switch (kind) {
    case MoePlan::Kind::kFew:
      return {8, 8, 1};
    case MoePlan::Kind::kWholeBatch:
      // A second tile of an expert reads its weights again: nearly all experts must fit into one.
      return {64, a.tokens * a.k <= 10 * a.experts ? 16 : 32, 1};
    case MoePlan::Kind::kSorted:
      return {32, 32, 1};
    case MoePlan::Kind::kPrefill:
      return {128, 128, kMoeTogether};
  }
  return {};
}

}  // namespace

int64_t moe_workspace(const MoeExperts& a, MoePlan& plan) {
  plan.pairs = a.tokens * a.k;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    void* const part = static_cast<char*>(a.workspace) + used;
    used += (bytes + 255) / 256 * 256;
    return part;
  };
  const auto tiles = [&](int cap) { return (std::min(a.experts, plan.pairs) + plan.pairs / cap + 1) * 16; };
  plan.tables.counts = static_cast<int*>(take(16));
  plan.tables.up_tiles = static_cast<MoeTile*>(take(tiles(plan.caps.up)));
  plan.tables.down_tiles = static_cast<MoeTile*>(take(tiles(plan.caps.down)));
  plan.tables.row_of = static_cast<int*>(take(4 * plan.pairs));
  plan.tables.pair_of = static_cast<int*>(take(4 * plan.pairs));
  plan.tables.counts_of_parts =
      plan.pairs > kMoeOneBlock
          ? static_cast<int*>(take((plan.pairs + kMoePart - 1) / kMoePart * a.experts * int64_t{sizeof(int)}))
          : nullptr;
  plan.sorted_x = plan.kind == MoePlan::Kind::kSorted ? take(2 * plan.pairs * a.hidden) : nullptr;
  plan.h = take(2 * plan.pairs * a.width);
  plan.o = take(2 * plan.pairs * a.hidden);
  return used;
}

MoeProduct moe_product_of(const MoeExperts& a, const MoePlan& plan, bool up) {
  MoeProduct p{};
  p.tables = plan.tables;
  p.ids = a.ids;
  p.bias = up ? a.up_bias : a.down_bias;
  p.out = up ? plan.h : plan.o;
  p.pairs = static_cast<int>(plan.pairs);
  p.experts = static_cast<int>(a.experts);
  p.k = static_cast<int>(a.k);
  p.columns = static_cast<int>(up ? 2 * a.width : a.hidden);
  p.out_width = static_cast<int>(up ? a.width : a.hidden);
  p.k_blocks = static_cast<int>((up ? a.hidden : a.width) / 64);
  const bool plain = a.activation == GateActivation::kSilu && a.alpha == 1.0f && std::isinf(a.limit) && a.limit > 0 &&
                     a.up_offset == 0.0f;
  p.rule = {a.activation, a.alpha, a.limit, a.up_offset, plain};
  p.frozen_weights = a.frozen_weights;
  p.early = up || plan.kind != MoePlan::Kind::kPrefill || a.frozen_weights;  // by speed
  return p;
}

void moe_gather(const MoeExperts& a, const MoePlan& plan) {
  launch(gather_kernel, {dim3(static_cast<unsigned>(plan.pairs)), kGatherThreads, 0, 1, 1, kMoeEarly}, a.stream,
         static_cast<const uint16_t*>(a.x), a.x_row, static_cast<uint16_t*>(plan.sorted_x), plan.tables,
         static_cast<int>(a.k), static_cast<int>(a.hidden));
}

void moe_combine(const MoeExperts& a, const MoePlan& plan) {
  if (a.dtype == DType::kBFloat16) return combine_as<BFloat16>(a, plan);
  combine_as<Float16>(a, plan);
}

int64_t moe_experts_workspace(const MoeExperts& a) {
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const bool activation = a.activation == GateActivation::kSilu || a.activation == GateActivation::kGeluTanh ||
                          a.activation == GateActivation::kRelu;
  const bool types = a.dtype != DType::kFloat32 && a.interleaved == a.transposed;
  const bool shapes = a.hidden % 64 == 0 && a.width % 64 == 0 && a.hidden > 0 && a.width > 0 && a.experts > 0 &&
                      a.experts <= kMaxMoeExperts && a.k <= kMaxPairsOfToken && a.tokens * a.k < INT_MAX / 2;
  const bool aligned = (address(a.x) | address(a.up) | address(a.down)) % 16 == 0 && a.x_row % 8 == 0;
  if (!activation || !types || !shapes || !aligned) return -1;
  MoePlan plan{};
  plan.kind = kind_of(a);
  plan.caps = caps_of(a, plan.kind);
  return moe_workspace(a, plan);
}

void moe_experts(const MoeExperts& a) {
  if (a.tokens == 0) return;
  MoePlan plan{};
  plan.kind = kind_of(a);
  plan.caps = caps_of(a, plan.kind);
  moe_workspace(a, plan);
  plan.up = moe_product_of(a, plan, true);
  plan.down = moe_product_of(a, plan, false);
  if (plan.kind != MoePlan::Kind::kFew) moe_order(a, plan.tables, plan.caps);
  if (plan.kind == MoePlan::Kind::kSorted) moe_gather(a, plan);
  if (plan.kind == MoePlan::Kind::kPrefill)
    moe_products_prefill(a, plan);
  else
    moe_products_decode(a, plan);
  moe_combine(a, plan);
}

}  // namespace quartz::kernels::cuda
