// 16-bit products whose operands the copy engine cannot read: odd strides or addresses, k of 0, anything. The chain of
// mma.sync over ascending steps of 16 k gives the bits of wgmma (measured: facts of the prototype).
#include <algorithm>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_kernels.h"
#include "kernels/cuda/matmul_tiles.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kM = 64, kN = 64, kK = 32, kThreads = 128;
constexpr int kPitch = kK + 8;  // of a row in shared memory: 80 bytes, no two rows of 8 in one bank

struct Strides {
  const uint16_t* data;
  int64_t rows, k, batch, row, column;  // strides in elements
};

// [64 rows, 32 k] from any strides, zeros outside; along the dimension that is adjacent in memory.
__device__ void load_tile(uint16_t (&tile)[kM][kPitch], const Strides& from, int64_t row0, int64_t k0) {
  const bool along_k = from.column == 1 || from.row != 1;
#pragma unroll 4
  for (int i = threadIdx.x; i < kM * kK; i += kThreads) {
    const int r = along_k ? i / kK : i % kM, k = along_k ? i % kK : i / kM;
    const bool inside = row0 + r < from.rows && k0 + k < from.k;
    tile[r][k] = inside ? from.data[(row0 + r) * from.row + (k0 + k) * from.column] : uint16_t{0};
  }
}

template <class T>
QUARTZ_DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, BFloat16>)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four warps of 32 x 32 each.
template <class T>
__global__ void __launch_bounds__(kThreads)
    general_kernel(Strides x, Strides w, Groups groups, const __grid_constant__ Product p) {
  __shared__ __align__(16) uint16_t x_tile[kM][kPitch], w_tile[kN][kPitch];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row = (warp & 1) * 32 + (lane >> 2), column = (warp >> 1) * 32 + (lane >> 2), pair = (lane & 3) * 2;
  Part part;
  if (!part_of_block<kM, kN>(p, groups, x, w, part)) return;
  float d[2][4][4] = {};
  const auto word = [](const uint16_t* at) { return *reinterpret_cast<const uint32_t*>(at); };
  for (int64_t k0 = 0; k0 < x.k; k0 += kK) {
    load_tile(x_tile, x, part.m, k0);
    load_tile(w_tile, w, part.n, k0);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kK; k += 16) {
      uint32_t a[2][4], b[4][2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int q = 0; q < 4; ++q) a[i][q] = word(&x_tile[row + 16 * i + (q & 1) * 8][k + pair + (q >> 1) * 8]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int q = 0; q < 2; ++q) b[j][q] = word(&w_tile[column + 8 * j][k + pair + q * 8]);
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) mma<T>(d[i][j], a[i], b[j]);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t m = part.m + row + 16 * i + 8 * h;
      if (m >= part.m_end) continue;
      const Row<T, true> out(p, part.batch, m);
#pragma unroll 1
      for (int j = 0; j < 4; ++j) {
        // A loop, not unrolled copies, of the epilogue: select the accumulators by comparison, not by address.
        float first = d[i][0][2 * h], second = d[i][0][2 * h + 1];
#pragma unroll
        for (int q = 1; q < 4; ++q) {
          first = j == q ? d[i][q][2 * h] : first;
          second = j == q ? d[i][q][2 * h + 1] : second;
        }
        const int64_t n = part.n + (warp >> 1) * 32 + 8 * j + pair;
        if (n < part.n_end) out.put(n, first);
        if (n + 1 < part.n_end) out.put(n + 1, second);
      }
    }
}

}  // namespace

void matmul_general(const Matmul& a, const Groups& groups) {
  const Strides x{static_cast<const uint16_t*>(a.x), a.m, a.k, a.x_batch, a.x_row, a.x_k};
  const Strides w{static_cast<const uint16_t*>(a.w), a.n, a.k, a.w_batch, a.w_row, a.w_k};
  static_assert(kM == kGeneralTile && kN == kGeneralTile);
  const LaunchShape shape{dim3(static_cast<unsigned>(parts(a, groups.ragged, kM, kN))), kThreads, 0};
  if (a.dtype == DType::kBFloat16)
    launch(general_kernel<BFloat16>, shape, a.stream, x, w, groups, product_of(a));
  else
    launch(general_kernel<Float16>, shape, a.stream, x, w, groups, product_of(a));
}

}  // namespace quartz::kernels::cuda
