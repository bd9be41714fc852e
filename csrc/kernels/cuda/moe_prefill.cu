#include "kernels/cuda/moe_prefill.cuh"

#include "kernels/cuda/moe_kernels.h"

namespace quartz::kernels::cuda {
namespace {

template <class T>
void products(const MoeExperts& a, const MoePlan& plan) {
  if (a.transposed)
    run_moe_up<MoeUpTile<T, 256, 4, Major::kMN, MoeGates::kAlternating, 1>>(a, plan.up);
  else
    run_moe_up<MoeUpTile<T, 256, 4, Major::kK, MoeGates::kHalves, 1>>(a, plan.up);
  moe_down_prefill(plan.h, a.width, a.down, a.dtype, !a.transposed, plan.pairs, a.width, plan.down, a.stream);
}

template <class T>
void down(const void* h, int64_t h_row, const void* w, DType dtype, bool k_major, int64_t rows, int64_t k,
          const MoeProduct& p, void* stream) {
  if (k_major) return run_moe_down<MoeDownTile<T, 256, 3, Major::kK, 1>>(h, h_row, w, dtype, rows, k, p, stream);
  run_moe_down<MoeDownTile<T, 256, 3, Major::kMN, 1>>(h, h_row, w, dtype, rows, k, p, stream);
}

}  // namespace

void moe_products_prefill(const MoeExperts& a, const MoePlan& plan) {
  if (a.dtype == DType::kBFloat16) return products<BFloat16>(a, plan);
  products<Float16>(a, plan);
}

void moe_down_prefill(const void* h, int64_t h_row, const void* w, DType dtype, bool k_major, int64_t rows, int64_t k,
                      const MoeProduct& p, void* stream) {
  if (dtype == DType::kBFloat16) return down<BFloat16>(h, h_row, w, dtype, k_major, rows, k, p, stream);
  down<Float16>(h, h_row, w, dtype, k_major, rows, k, p, stream);
}

}  // namespace quartz::kernels::cuda
