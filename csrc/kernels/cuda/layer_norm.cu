#include "kernels/layer_norm.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

template <class T, int P, int N>
__global__ void __launch_bounds__(kBlock<P>) layer_norm_rows(LayerNorm a, bool aligned, bool aligned_parameters) {
  constexpr int V = kVector<T>;
  constexpr int kHeld = N > 0 ? N : 1;
  __shared__ float shared[2][P / 32];
  const int64_t row = row_of_thread<P>();
  if (row >= a.rows) return;
  const int thread = threadIdx.x % P;
  const int64_t vectors = (a.width + V - 1) / V;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  T* y = static_cast<T*>(a.y) + row * a.width;

  Pack<T> held[kHeld];
  // Calls body(vector, its elements) for the vectors of this thread; `first` loads them.
  const auto each = [&](bool first, const auto& body) {
    if constexpr (N > 0) {
      if (first) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          if (thread + j * P < vectors) held[j] = load_pack<T>(x, thread + j * P, a.width, aligned, T{});
        }
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (thread + j * P < vectors) body(static_cast<int64_t>(thread + j * P), held[j]);
      }
    } else {
#pragma unroll 4
      for (int64_t v = thread; v < vectors; v += P) body(v, load_pack<T>(x, v, a.width, aligned, T{}));
    }
  };

  float sums[V] = {};
  each(true, [&](int64_t, const Pack<T>& pack) {
    float values[V];
    widen(pack, values);
#pragma unroll
    for (int i = 0; i < V; ++i) sums[i] += values[i];
  });
  const auto width = static_cast<float>(a.width);
  const float mean = over_threads<P>(fold(sums, Add{}), Add{}, shared[0]) / width;
#pragma unroll
  for (int i = 0; i < V; ++i) sums[i] = 0.0f;
  each(false, [&](int64_t v, const Pack<T>& pack) {
    float values[V];
    widen(pack, values);
    const auto here = static_cast<int>(a.width - v * V < V ? a.width - v * V : V);  // elements of the row in the vector
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float difference = i < here ? values[i] - mean : 0.0f;
      sums[i] = fmaf(difference, difference, sums[i]);
    }
  });
  const float variance = over_threads<P>(fold(sums, Add{}), Add{}, shared[1]) / width;
  const float scale = 1.0f / sqrtf(variance + a.eps);
  if (thread == 0 && a.mean != nullptr) {
    a.mean[row] = mean;
    a.rstd[row] = scale;
  }
  each(false, [&](int64_t v, const Pack<T>& pack) {
    float weight[V], bias[V];
    if (a.weight != nullptr) load_parameters(a.weight, a.weight_dtype, v * V, a.width, aligned_parameters, weight);
    if (a.bias != nullptr) load_parameters(a.bias, a.weight_dtype, v * V, a.width, aligned_parameters, bias);
    float values[V];
    widen(pack, values);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      values[i] = (values[i] - mean) * scale;
      if (a.weight != nullptr) values[i] = __fmul_rn(values[i], weight[i]);
      if (a.bias != nullptr) values[i] = __fadd_rn(values[i], bias[i]);
    }
    store_pack<T>(y, v, a.width, aligned, narrow<T>(values));
  });
}

}  // namespace

void layer_norm(const LayerNorm& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return;
  with_dtype(a.dtype, [&]<class T>() {
    const bool aligned =
        aligned_rows(a.x, a.x_stride, sizeof(T), a.rows) && aligned_rows(a.y, a.width, sizeof(T), a.rows);
    const bool aligned_parameters = aligned16(a.weight) && aligned16(a.bias);
    with_row_plan<T>(a.width, [&]<int P, int N>() {
      layer_norm_rows<T, P, N>
          <<<blocks_for<P>(a.rows), kBlock<P>, 0, static_cast<cudaStream_t>(stream)>>>(a, aligned, aligned_parameters);
    });
  });
}

}  // namespace quartz::kernels::cuda
