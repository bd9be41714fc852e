// Products of groups of rows: the second product of the experts layer, over tiles made from the offsets.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/moe_kernels.h"
#include "kernels/matmul_cuda.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = kMaxMoeExperts;

// Thread g makes the tiles of group g.
__global__ void __launch_bounds__(kThreads)
    tiles_kernel(const int32_t* offsets, int groups, int rows, int cap, int* count, MoeTile* tiles) {
  __shared__ int sums[kThreads];
  const int g = threadIdx.x;
  const auto offset = [&](int i) { return i < 0 ? 0 : min(max(offsets[i], 0), rows); };
  const int begin = g < groups ? offset(g - 1) : 0, n = g < groups ? max(offset(g) - begin, 0) : 0;
  const int mine = (n + cap - 1) / cap;
  int total = mine;
  sums[g] = total;
  __syncthreads();
  for (int i = 1; i < kThreads; i <<= 1) {  // inclusive sums
    const int other = g >= i ? sums[g - i] : 0;
    __syncthreads();
    total += other;
    sums[g] = total;
    __syncthreads();
  }
  for (int i = 0; i < mine; ++i) tiles[total - mine + i] = {g, begin + i * cap, min(cap, n - i * cap), 0};
  if (g == kThreads - 1) *count = total;
}

bool few_rows(const Matmul& a) { return a.m <= kMoeDecodeRows * a.batch; }
int cap_of(const Matmul& a) { return few_rows(a) ? kMoeDecodeRows : 128; }

}  // namespace

int64_t matmul_grouped_workspace(const Matmul& a) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool types = a.dtype != DType::kFloat32 && a.out_dtype == a.dtype;
  const bool plain = a.bias == nullptr && a.alpha == 1.0f && a.activation == Activation::kNone;
  const bool shapes = a.k > 0 && a.k % 64 == 0 && a.n % 8 == 0 && a.batch <= kMaxMoeExperts && a.m < INT32_MAX / 2 &&
                      a.n < INT32_MAX / 2 && a.k < INT32_MAX / 2;
  const bool x = aligned(a.x) && a.x_k == 1 && a.x_row % 8 == 0 && a.x_row > 0;
  const bool w =
      aligned(a.w) && a.w_batch == a.n * a.k && ((a.w_k == 1 && a.w_row == a.k) || (a.w_row == 1 && a.w_k == a.n));
  if (!types || !plain || !shapes || !x || !w || !aligned(a.out) || a.out_row != a.n) return -1;
  return 16 + 16 * (a.batch + a.m / cap_of(a) + 1);
}

void matmul_grouped(const Matmul& a, const int32_t* offsets, void* workspace) {
  if (a.m == 0 || a.n == 0 || a.batch == 0) return;
  MoeProduct p{};
  p.tables.counts = static_cast<int*>(workspace);
  p.tables.up_tiles = p.tables.down_tiles = reinterpret_cast<MoeTile*>(p.tables.counts + 4);
  p.out = a.out;
  p.experts = static_cast<int>(a.batch);
  p.columns = p.out_width = static_cast<int>(a.n);
  p.k_blocks = static_cast<int>(a.k / 64);
  // The tables are the kernel before: the product must not run ahead of it.
  p.frozen_weights = false;
  launch(tiles_kernel, {dim3(1), kThreads, 0}, a.stream, offsets, static_cast<int>(a.batch), static_cast<int>(a.m),
         cap_of(a), p.tables.counts + (few_rows(a) ? 1 : 0), p.tables.up_tiles);
  const bool k_major = a.w_k == 1;
  const auto product = few_rows(a) ? moe_down_decode : moe_down_prefill;
  product(a.x, a.x_row, a.w, a.dtype, k_major, a.m, a.k, p, a.stream);
}

}  // namespace quartz::kernels::cuda
