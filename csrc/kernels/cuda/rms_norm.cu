#include "kernels/rms_norm.h"

#include <algorithm>
#include <climits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreadsAtOnce = 1024;  // of a multiprocessor, with the registers that reading ahead takes

// With more vectors a thread, registers would not do.
template <int N>
constexpr bool kReadsAhead = N > 0 && N <= 2;

struct Aligned {
  bool rows, weight;  // all of x, residual, y and sum; the weight
};

// The sums of squares follow kernels/cuda/rows.cuh, with fma. A block takes rows in turn: without a residual to add,
// the next row is read while this one is worked on.
template <class T, int P, int N, bool kAdd>
__global__ void __launch_bounds__(kBlock<P>, kThreadsAtOnce / kBlock<P>) rms_norm_rows(RmsNorm a, Aligned aligned) {
  constexpr int V = kVector<T>;
  constexpr int kHeld = N > 0 ? N : 1;
  constexpr bool kAhead = kReadsAhead<N> && !kAdd;
  __shared__ float shared[2][P / 32];
  const int thread = threadIdx.x % P;
  const int64_t vectors = (a.width + V - 1) / V;
  // The weight is read once for all rows of the thread.
  const bool kept = N > 0 && a.weight != nullptr && a.weight_dtype == kDTypeOf<T>;

  const auto read = [&](int64_t row, int64_t v) {
    auto pack = load_pack<T>(static_cast<const T*>(a.x) + row * a.x_stride, v, a.width, aligned.rows, T{});
    if constexpr (kAdd) {
      const auto* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
      float values[V], others[V];
      widen(pack, values);
      widen(load_pack<T>(residual, v, a.width, aligned.rows, T{}), others);
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] += others[i];
      pack = narrow<T>(values);
      store_pack<T>(static_cast<T*>(a.sum) + row * a.width, v, a.width, aligned.rows, pack);
    }
    return pack;
  };
  const auto read_row = [&](int64_t row, Pack<T>(&packs)[kHeld]) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (thread + j * P < vectors) packs[j] = read(row, thread + j * P);
    }
  };

  const int64_t step = static_cast<int64_t>(gridDim.x) * kRowsOfBlock<P>;
  int64_t row = row_of_thread<P>();
  Pack<T> held[kHeld], ahead[kHeld], weights[kHeld];
  if (kAhead && row < a.rows) read_row(row, held);
  if (kept) {
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (thread + j * P < vectors) {
        weights[j] = load_pack<T>(static_cast<const T*>(a.weight), thread + j * P, a.width, aligned.weight, T{});
      }
    }
  }
  for (int turn = 0; row < a.rows; row += step, turn ^= 1) {
    float squares[V] = {};
    const auto add_squares = [&](const Pack<T>& pack) {
      float values[V];
      widen(pack, values);
#pragma unroll
      for (int i = 0; i < V; ++i) squares[i] = fmaf(values[i], values[i], squares[i]);
    };
    if constexpr (N > 0) {
      if constexpr (kAhead) {
        if (row + step < a.rows) read_row(row + step, ahead);
      } else {
        read_row(row, held);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (thread + j * P < vectors) add_squares(held[j]);
      }
    } else {
      for (int64_t v = thread; v < vectors; v += P) add_squares(read(row, v));
    }
    const float total = over_threads<P>(fold(squares, Add{}), Add{}, shared[turn]);
    const float scale = 1.0f / sqrtf(total / static_cast<float>(a.width) + a.eps);

    T* y = static_cast<T*>(a.y) + row * a.width;
    const auto write = [&](int64_t v, const Pack<T>& pack, const Pack<T>& weight_pack) {
      float values[V], weight[V];
      widen(pack, values);
#pragma unroll
      for (int i = 0; i < V; ++i) values[i] *= scale;
      if (a.round_first) widen(narrow<T>(values), values);
      if (a.weight != nullptr) {
        if (kept) {
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
      const T* again =
          kAdd ? static_cast<const T*>(a.sum) + row * a.width : static_cast<const T*>(a.x) + row * a.x_stride;
      for (int64_t v = thread; v < vectors; v += P) {
        write(v, load_pack<T, kAdd>(again, v, a.width, aligned.rows, T{}), Pack<T>{});
      }
    }
    if constexpr (kAhead) {
#pragma unroll
      for (int j = 0; j < N; ++j) held[j] = ahead[j];
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
      const auto run = [&](auto kernel, unsigned most) {
        kernel<<<std::min(blocks_for<P>(a.rows), most), kBlock<P>, 0, static_cast<cudaStream_t>(stream)>>>(a, aligned);
      };
      // As many blocks as are resident at a time where rows are read ahead; else one for each row.
      const auto resident = static_cast<unsigned>(multiprocessors() * (kThreadsAtOnce / kBlock<P>));
      if (a.residual != nullptr) return run(rms_norm_rows<T, P, N, true>, UINT_MAX);
      run(rms_norm_rows<T, P, N, false>, kReadsAhead<N> ? resident : UINT_MAX);
    });
  });
}

}  // namespace quartz::kernels::cuda
