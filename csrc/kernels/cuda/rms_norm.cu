#include "kernels/rms_norm.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

struct Aligned {
  bool rows, weight;  // all of x, residual, y and sum; the weight
};

// The sums of squares follow kernels/cuda/rows.cuh, with fma.
// kThreadsAtOnce: of a multiprocessor, for which the registers must do.
template <class T, int P, int N, bool kAdd, int kThreadsAtOnce, bool kEarly>
__global__ void __launch_bounds__(kBlock<P>, kThreadsAtOnce / kBlock<P>) rms_norm_rows(RmsNorm a, Aligned aligned) {
  constexpr int V = kVector<T>;
  constexpr int kHeld = N > 0 ? N : 1;
  __shared__ float shared[P / 32];
  const int64_t row = row_of_thread<P>();
  if (row >= a.rows) return;
  const int thread = threadIdx.x % P;
  const int64_t vectors = (a.width + V - 1) / V;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
  T* sum = static_cast<T*>(a.sum) + row * a.width;
  T* y = static_cast<T*>(a.y) + row * a.width;

  Pack<T> held[kHeld], weights[kHeld];
  const bool early =
      kEarly && N > 0 && a.weight != nullptr && a.weight_dtype == kDTypeOf<T>;  // the weight is read beside the row
  float squares[V] = {};
  const auto read = [&](int64_t v, Pack<T>& pack) {
    pack = load_pack<T>(x, v, a.width, aligned.rows, T{});
    if constexpr (kAdd) {
      const auto other = load_pack<T>(residual, v, a.width, aligned.rows, T{});
      float values[V], others[V];
      widen(pack, values);
      widen(other, others);
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] += others[i];
      pack = narrow<T>(values);
      store_pack<T>(sum, v, a.width, aligned.rows, pack);
    }
  };
  const auto add_squares = [&](const Pack<T>& pack) {
    float values[V];
    widen(pack, values);
#pragma unroll
    for (int i = 0; i < V; ++i) squares[i] = fmaf(values[i], values[i], squares[i]);
  };
  if constexpr (N > 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (thread + j * P < vectors) read(thread + j * P, held[j]);
    }
    if (early) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (thread + j * P < vectors) {
          weights[j] = load_pack<T>(static_cast<const T*>(a.weight), thread + j * P, a.width, aligned.weight, T{});
        }
      }
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (thread + j * P < vectors) add_squares(held[j]);
    }
  } else {
    for (int64_t v = thread; v < vectors; v += P) {
      read(v, held[0]);
      add_squares(held[0]);
    }
  }
  const float total = over_threads<P>(fold(squares, Add{}), Add{}, shared);
  const float scale = 1.0f / sqrtf(total / static_cast<float>(a.width) + a.eps);

  const auto write = [&](int64_t v, const Pack<T>& pack, const Pack<T>& weight_pack) {
    float values[V], weight[V];
    widen(pack, values);
#pragma unroll
    for (int i = 0; i < V; ++i) values[i] *= scale;
    if (a.round_first) widen(narrow<T>(values), values);
    if (a.weight != nullptr) {
      if (early) {
        widen(weight_pack, weight);
      } else {
        load_parameters(a.weight, a.weight_dtype, v * V, a.width, aligned.weight, weight);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] *= a.weight_offset + weight[i];
    }
    store_pack<T>(y, v, a.width, aligned.rows, narrow<T>(values));
  };
  if constexpr (N > 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (thread + j * P < vectors) write(thread + j * P, held[j], weights[j]);
    }
  } else {
    for (int64_t v = thread; v < vectors; v += P) {
      if constexpr (kAdd) {
        write(v, load_pack<T, true>(sum, v, a.width, aligned.rows, T{}), Pack<T>{});
      } else {
        write(v, load_pack<T>(x, v, a.width, aligned.rows, T{}), Pack<T>{});
      }
    }
  }
}

}  // namespace

void rms_norm(const RmsNorm& a, void* stream) {
  if (a.rows == 0 || a.width == 0) return;
  with_dtype(a.dtype, [&]<class T>() {
    constexpr int64_t kSize = sizeof(T);
    Aligned aligned;
    aligned.rows = aligned_rows(a.x, a.x_stride, kSize, a.rows) && aligned_rows(a.y, a.width, kSize, a.rows) &&
                   (a.residual == nullptr || (aligned_rows(a.residual, a.residual_stride, kSize, a.rows) &&
                                              aligned_rows(a.sum, a.width, kSize, a.rows)));
    aligned.weight = aligned16(a.weight);
    with_row_plan<T>(a.width, [&]<int P, int N>() {
      const unsigned blocks = blocks_for<P>(a.rows);
      const auto run = [&](auto kernel) {
        kernel<<<blocks, kBlock<P>, 0, static_cast<cudaStream_t>(stream)>>>(a, aligned);
      };
      // Few rows: latency counts, so the weight is read beside the row. Many: the number of threads at a time does.
      constexpr int kMost = N > 0 && N <= 2 ? 2048 : kBlock<P>;
      const bool few = blocks <= static_cast<unsigned>(4 * multiprocessors());
      if (a.residual != nullptr) {
        if (few) return run(rms_norm_rows<T, P, N, true, kBlock<P>, true>);
        return run(rms_norm_rows<T, P, N, true, kMost, false>);
      }
      if (few) return run(rms_norm_rows<T, P, N, false, kBlock<P>, true>);
      run(rms_norm_rows<T, P, N, false, kMost, false>);
    });
  });
}

}  // namespace quartz::kernels::cuda
