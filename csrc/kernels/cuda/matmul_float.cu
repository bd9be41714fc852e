// fp32 products without TF32: every output is one chain of fused multiply-adds over ascending k, from any strides.
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_kernels.h"
#include "kernels/cuda/matmul_tiles.cuh"

namespace quartz::kernels::cuda {
namespace {

struct Strides {
  const float* data;
  int64_t rows, k, batch, row, column;  // strides in elements
};

// The tile's [kRows, kK] part, a thread's share held in registers until the shared copy may be overwritten.
template <int kRows, int kK, int kThreads>
struct Loader {
  static constexpr int kEach = kRows * kK / kThreads;
  static_assert(kRows * kK % kThreads == 0);
  float values[kEach];

  QUARTZ_DEVICE void load(const Strides& from, int64_t row0, int64_t k0, bool along_k) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = threadIdx.x + j * kThreads;
      const int r = along_k ? i / kK : i % kRows, k = along_k ? i % kK : i / kRows;
      const bool inside = row0 + r < from.rows && k0 + k < from.k;
      values[j] = inside ? __ldg(from.data + (row0 + r) * from.row + (k0 + k) * from.column) : 0.0f;
    }
  }
  template <int kPitch>
  QUARTZ_DEVICE void store(float (&tile)[kK][kPitch], bool along_k) const {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int i = threadIdx.x + j * kThreads;
      tile[along_k ? i % kK : i / kRows][along_k ? i / kK : i % kRows] = values[j];
    }
  }
};

// kM x kN of a block; a thread has kRows x kColumns of them, in groups of 4 neighbours (or fewer).
template <int kM, int kN, int kRows, int kColumns, int kK>
__global__ void __launch_bounds__(kM / kRows * (kN / kColumns))
    float_kernel(Strides x, Strides w, Groups groups, const __grid_constant__ Product p) {
  constexpr int kAcross = kN / kColumns, kThreads = kM / kRows * kAcross;
  __shared__ __align__(16) float x_tile[2][kK][kM + 4], w_tile[2][kK][kN + 4];
  wait_for_previous_kernel();
  let_next_kernel_start();
  Part part;
  if (!part_of_block<kM, kN>(p, groups, x, w, part)) return;
  const int64_t m0 = part.m, n0 = part.n;
  const bool x_along_k = x.column == 1 || x.row != 1, w_along_k = w.column == 1 || w.row != 1;
  // Thread (r, c) has the rows 4 r + i of every group of 4 kM / kRows rows, the columns likewise.
  constexpr int kRowGroup = kRows < 4 ? kRows : 4, kColumnGroup = kColumns < 4 ? kColumns : 4;
  const int r0 = static_cast<int>(threadIdx.x) / kAcross * kRowGroup;
  const int c0 = static_cast<int>(threadIdx.x) % kAcross * kColumnGroup;
  const auto row_of = [&](int i) { return i / kRowGroup * (kM / kRows * kRowGroup) + r0 + i % kRowGroup; };
  const auto column_of = [&](int j) { return j / kColumnGroup * (kAcross * kColumnGroup) + c0 + j % kColumnGroup; };

  Loader<kM, kK, kThreads> x_loader;
  Loader<kN, kK, kThreads> w_loader;
  float d[kRows][kColumns] = {};
  const int64_t steps = (x.k + kK - 1) / kK;
  if (steps > 0) {
    x_loader.load(x, m0, 0, x_along_k);
    w_loader.load(w, n0, 0, w_along_k);
    x_loader.store(x_tile[0], x_along_k);
    w_loader.store(w_tile[0], w_along_k);
    __syncthreads();
  }
  for (int64_t step = 0; step < steps; ++step) {
    const int now = static_cast<int>(step & 1);
    if (step + 1 < steps) {
      x_loader.load(x, m0, (step + 1) * kK, x_along_k);
      w_loader.load(w, n0, (step + 1) * kK, w_along_k);
    }
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      float a[kRows], b[kColumns];
#pragma unroll
      for (int i = 0; i < kRows; ++i) a[i] = x_tile[now][k][row_of(i)];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) b[j] = w_tile[now][k][column_of(j)];
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) d[i][j] = __fmaf_rn(a[i], b[j], d[i][j]);
    }
    if (step + 1 < steps) {
      x_loader.store(x_tile[now ^ 1], x_along_k);
      w_loader.store(w_tile[now ^ 1], w_along_k);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t m = m0 + row_of(i);
    if (m >= part.m_end) continue;
    const Row<BFloat16, true> out(p, part.batch, m);  // the type of 16-bit values plays no part
#pragma unroll 1
    for (int j = 0; j < kColumns; ++j) {
      float value = d[i][0];  // by comparison, so that the accumulators stay in registers
#pragma unroll
      for (int q = 1; q < kColumns; ++q) value = j == q ? d[i][q] : value;
      if (n0 + column_of(j) < part.n_end) out.put(n0 + column_of(j), value);
    }
  }
}

template <int kM, int kN, int kRows, int kColumns, int kK>
void run(const Matmul& a, const Groups& groups) {
  const Strides x{static_cast<const float*>(a.x), a.m, a.k, a.x_batch, a.x_row, a.x_k};
  const Strides w{static_cast<const float*>(a.w), a.n, a.k, a.w_batch, a.w_row, a.w_k};
  launch(float_kernel<kM, kN, kRows, kColumns, kK>,
         {dim3(static_cast<unsigned>(parts(a, groups.ragged, kM, kN))), kM / kRows * (kN / kColumns), 0}, a.stream, x,
         w, groups, product_of(a));
}

}  // namespace

void matmul_float(const Matmul& a, const Groups& groups) {
  if (groups.ragged != Ragged::kNone) return run<kGeneralTile, kGeneralTile, 4, 4, 16>(a, groups);
  if (a.m <= 8) return run<8, 16, 1, 1, 128>(a, groups);
  if (a.m <= 64 || (a.m + 127) / 128 * ((a.n + 127) / 128) * a.batch < multiprocessors())
    return run<64, 64, 4, 4, 16>(a, groups);
  run<128, 128, 8, 8, 16>(a, groups);
}

}  // namespace quartz::kernels::cuda
