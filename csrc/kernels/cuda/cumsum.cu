#include "kernels/cumsum.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

template <class T, class Y>
__global__ void __launch_bounds__(kThreads) cumsum_rows(CumSum a, bool aligned) {
  constexpr int V = kVector<T>;
  __shared__ float of_warp[2][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* x = static_cast<const T*>(a.x) + static_cast<int64_t>(blockIdx.x) * a.x_stride;
  Y* y = static_cast<Y*>(a.y) + static_cast<int64_t>(blockIdx.x) * a.width;
  const int64_t vectors = (a.width + V - 1) / V;
  float before_tile = 0.0f;
  int parity = 0;
  for (int64_t tile = 0; tile < vectors; tile += kThreads, parity ^= 1) {
    const int64_t v = tile + threadIdx.x;
    float sums[V] = {};
    if (v < vectors) {
      const auto pack = load_pack<T>(x, v, a.width, aligned, T{});
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] = widen(pack.item[i]) + (i > 0 ? sums[i - 1] : 0.0f);
    }
    float upto = sums[V - 1];  // of this warp, through this thread
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, upto, distance);
      if (lane >= distance) upto = other + upto;
    }
    if (lane == 31) of_warp[parity][warp] = upto;
    __syncthreads();
    float before_warp = before_tile, total = before_tile;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) before_warp = total;
      total += of_warp[parity][w];
    }
    float before = __shfl_up_sync(0xffffffffu, upto, 1);
    before = lane == 0 ? before_warp : before_warp + before;
    if (v < vectors) {
      if constexpr (sizeof(Y) == sizeof(T)) {
        Pack<Y> result;
#pragma unroll
        for (int i = 0; i < V; ++i) result.item[i] = narrow<Y>(before + sums[i]);
        store_pack<Y>(y, v, a.width, aligned, result);
      } else {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          if (v * V + i < a.width) y[v * V + i] = narrow<Y>(before + sums[i]);
        }
      }
    }
    before_tile = total;
  }
}

}  // namespace

void cumsum(const CumSum& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return;
  with_dtype(a.dtype, [&]<class T>() {
    const auto run = [&]<class Y>() {
      const bool aligned =
          aligned_rows(a.x, a.x_stride, sizeof(T), a.rows) && aligned_rows(a.y, a.width, sizeof(Y), a.rows);
      cumsum_rows<T, Y><<<static_cast<unsigned>(a.rows), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, aligned);
    };
    if (a.y_dtype == a.dtype) return run.template operator()<T>();
    run.template operator()<float>();
  });
}

}  // namespace quartz::kernels::cuda
