// The tile kernels of matmul_prefill.cuh with an operand that is not k-major, and those with an activation.
#include "kernels/cuda/matmul_prefill.cuh"

#include "kernels/cuda/matmul_kernels.h"

namespace quartz::kernels::cuda {
namespace {

template <class T, Major kX, Major kW>
void mixed(const Matmul& a) {
  if (a.n > 128) return run_prefill<PrefillTile<T, 256, 4, kX, kW>>(a);
  run_prefill<PrefillTile<T, 128, 6, kX, kW>>(a);
}

template <class T>
void mixed(const Matmul& a, const Layout& layout) {
  const bool x = layout.x_k_major, w = layout.w_k_major;
  if (a.activation != Activation::kNone) {
    if (!x) return matmul_general(a);
    if (w) return run_prefill<PrefillTile<T, 128, 6, Major::kK, Major::kK, true>>(a);
    return run_prefill<PrefillTile<T, 128, 6, Major::kK, Major::kMN, true>>(a);
  }
  if (x) return mixed<T, Major::kK, Major::kMN>(a);
  if (w) return mixed<T, Major::kMN, Major::kK>(a);
  mixed<T, Major::kMN, Major::kMN>(a);
}

}  // namespace

void matmul_prefill_mixed(const Matmul& a, const Layout& layout) {
  if (a.dtype == DType::kBFloat16) return mixed<BFloat16>(a, layout);
  mixed<Float16>(a, layout);
}

}  // namespace quartz::kernels::cuda
