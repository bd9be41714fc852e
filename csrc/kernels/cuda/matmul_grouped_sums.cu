// Groups by k: one sum a group, of products of columns. It is the gradient of the experts' weights.
#include "kernels/cuda/matmul_kernels.h"
#include "kernels/cuda/matmul_prefill.cuh"

namespace quartz::kernels::cuda {
namespace {

template <class T>
void run(const Matmul& a, const MoeTile* ranges) {
  constexpr auto kMN = Major::kMN;
  if (a.n > 128) return run_prefill<PrefillTile<T, 256, 4, kMN, kMN, false, 0, true>>(a, ranges);
  run_prefill<PrefillTile<T, 128, 6, kMN, kMN, false, 0, true>>(a, ranges);
}

}  // namespace

void matmul_grouped_sums(const Matmul& a, const MoeTile* ranges) {
  if (a.dtype == DType::kBFloat16) return run<BFloat16>(a, ranges);
  run<Float16>(a, ranges);
}

}  // namespace quartz::kernels::cuda
