#include "kernels/cuda/matmul_prefill.cuh"

#include "kernels/cuda/matmul_kernels.h"

namespace quartz::kernels::cuda {
namespace {

// The width with the least waves x cost. A step of 16 k of a 128 x width tile moves (128 + width) x 32 bytes into
// shared memory and 128 x 32 + 2 x width x 32 out of it, at 128 bytes a cycle: 64 + 0.75 width cycles. The products
// take `width`.
int best_width(const Matmul& a, std::initializer_list<int> widths) {
  const int64_t blocks = multiprocessors();
  int64_t least = INT64_MAX;
  int best = 0;
  for (const int width : widths) {
    const int64_t tiles = (a.m + 127) / 128 * ((a.n + width - 1) / width) * a.batch;
    const int64_t cost = (tiles + blocks - 1) / blocks * (std::max(4 * width, 256 + 3 * width) + 32);
    if (cost < least) {
      least = cost;
      best = width;
    }
  }
  return best;
}

template <class T>
void k_major(const Matmul& a) {
  switch (best_width(a, {32, 40, 48, 64, 80, 96, 128, 160, 192, 224, 256})) {
    case 32:
      return run_prefill<PrefillTile<T, 32, 9>>(a);
    case 40:
      return run_prefill<PrefillTile<T, 40, 9>>(a);
    case 48:
      return run_prefill<PrefillTile<T, 48, 8>>(a);
    case 64:
      return run_prefill<PrefillTile<T, 64, 8>>(a);
    case 80:
      return run_prefill<PrefillTile<T, 80, 7>>(a);
    case 96:
      return run_prefill<PrefillTile<T, 96, 6>>(a);
    case 128:
      return run_prefill<PrefillTile<T, 128, 6>>(a);
    case 160:
      return run_prefill<PrefillTile<T, 160, 5>>(a);
    case 192:
      return run_prefill<PrefillTile<T, 192, 4>>(a);
    case 224:
      return run_prefill<PrefillTile<T, 224, 4>>(a);
    default:
      return run_prefill<PrefillTile<T, 256, 4>>(a);
  }
}

}  // namespace

void matmul_prefill(const Matmul& a) {
  if (a.dtype == DType::kBFloat16) return k_major<BFloat16>(a);
  k_major<Float16>(a);
}

}  // namespace quartz::kernels::cuda
