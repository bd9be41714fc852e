#include "kernels/softmax.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr float kMinusInfinity = -__builtin_huge_valf();

template <class T, class Y, int P, int N>
__global__ void __launch_bounds__(kBlock<P>) softmax_rows(Softmax a, bool aligned) {
  constexpr int V = kVector<T>;
  constexpr int kHeld = N > 0 ? N : 1;
  __shared__ float shared[2][P / 32];
  const int64_t row = row_of_thread<P>();
  if (row >= a.rows) return;
  const int thread = threadIdx.x % P;
  const int64_t vectors = (a.width + V - 1) / V;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  Y* y = static_cast<Y*>(a.y) + row * a.width;
  const T lowest = narrow<T>(kMinusInfinity);  // behind the row: adds exp(-infinity) = 0

  // A row that fits is kept in registers as float: first x, then exp(x - maximum) for softmax.
  float held[kHeld][V];
  const auto read = [&](int64_t v, float(&values)[V]) { widen(load_pack<T>(x, v, a.width, aligned, lowest), values); };
  const auto each = [&](const auto& body) {
    if constexpr (N > 0) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (thread + j * P < vectors) body(static_cast<int64_t>(thread + j * P), held[j]);
      }
    } else {
#pragma unroll 4
      for (int64_t v = thread; v < vectors; v += P) {
        read(v, held[0]);
        body(v, held[0]);
      }
    }
  };
  if constexpr (N > 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (thread + j * P < vectors) read(thread + j * P, held[j]);
    }
  }

  float maxima[V];
#pragma unroll
  for (int i = 0; i < V; ++i) maxima[i] = kMinusInfinity;
  each([&](int64_t, float(&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) maxima[i] = fmaxf(maxima[i], values[i]);
  });
  const float maximum = over_threads<P>(fold(maxima, Max{}), Max{}, shared[0]);
  float sums[V] = {};
  each([&](int64_t, float(&values)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float power = exp_for<Y>(values[i] - maximum);
      sums[i] += power;
      if (N > 0 && !a.log) values[i] = power;
    }
  });
  const float sum = over_threads<P>(fold(sums, Add{}), Add{}, shared[1]);
  const float scale = a.log ? logf(sum) : 1.0f / sum;
  each([&](int64_t v, float(&values)[V]) {
#pragma unroll
    for (int j = 0; j < V / kVector<Y>; ++j) {
      float part[kVector<Y>];
#pragma unroll
      for (int i = 0; i < kVector<Y>; ++i) {
        const float value = values[j * kVector<Y> + i];
        if (a.log) {
          part[i] = (value - maximum) - scale;
        } else {
          part[i] = (N > 0 ? value : exp_for<Y>(value - maximum)) * scale;
        }
      }
      store_pack<Y>(y, v * (V / kVector<Y>)+j, a.width, aligned, narrow<Y>(part));
    }
  });
}

}  // namespace

void softmax(const Softmax& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return;
  with_dtype(a.dtype, [&]<class T>() {
    const auto run = [&]<class Y>() {
      const bool aligned =
          aligned_rows(a.x, a.x_stride, sizeof(T), a.rows) && aligned_rows(a.y, a.width, sizeof(Y), a.rows);
      with_row_plan<T>(a.width, [&]<int P, int N>() {
        softmax_rows<T, Y, P, N>
            <<<blocks_for<P>(a.rows), kBlock<P>, 0, static_cast<cudaStream_t>(stream)>>>(a, aligned);
      });
    };
    if (a.y_dtype == a.dtype) return run.template operator()<T>();
    run.template operator()<float>();
  });
}

}  // namespace quartz::kernels::cuda
