#include "kernels/row_reduce.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

// Reductions of one kind share a kernel; the rest is decided at run time.
enum class Kind { kSum, kVariance, kLogSumExp, kBest };

struct Larger {
  __device__ __forceinline__ unsigned long long operator()(unsigned long long a, unsigned long long b) const {
    return a > b ? a : b;
  }
};
struct Lower {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return min(a, b); }
};
struct MaxOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
  }
};
struct MinOrNan {
  __device__ __forceinline__ float operator()(float a, float b) const {
    float least;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
    return least;
  }
};

__device__ __forceinline__ void put(const RowReduce& a, int64_t row, float value) {
  switch (a.y_dtype) {
    case DType::kFloat32:
      static_cast<float*>(a.y)[row] = value;
      return;
    case DType::kFloat16:
      static_cast<Float16*>(a.y)[row] = narrow<Float16>(value);
      return;
    default:
      static_cast<BFloat16*>(a.y)[row] = narrow<BFloat16>(value);
  }
}

// N vectors of a thread are kept in registers for a second pass; 0: the row is read again.
template <class T, Kind K, int P, int N>
__global__ void __launch_bounds__(kBlock<P>) reduce_rows(RowReduce a, bool aligned) {
  constexpr int V = kVector<T>;
  constexpr int kHeld = N > 0 ? N : 1;
  __shared__ float shared[2][P / 32];
  __shared__ uint32_t shared_index[P / 32];
  __shared__ unsigned long long shared_best[P / 32];
  const int64_t row = row_of_thread<P>();
  if (row >= a.rows) return;
  const int thread = threadIdx.x % P;
  const int64_t vectors = (a.width + V - 1) / V;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;

  const float infinity = __builtin_huge_valf();
  const T fill = narrow<T>(K == Kind::kLogSumExp || a.reduction == Reduction::kArgMax ? -infinity
                           : a.reduction == Reduction::kArgMin                        ? infinity
                                                                                      : 0.0f);
  Pack<T> held[kHeld];
  if constexpr (N > 0) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (thread + j * P < vectors) held[j] = load_pack<T>(x, thread + j * P, a.width, aligned, fill);
    }
  }
  const auto each = [&](const auto& body) {
    float values[V];
    if constexpr (N > 0) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (thread + j * P < vectors) {
          widen(held[j], values);
          body(static_cast<int64_t>(thread + j * P), values);
        }
      }
    } else {
#pragma unroll 4
      for (int64_t v = thread; v < vectors; v += P) {
        widen(load_pack<T>(x, v, a.width, aligned, fill), values);
        body(v, values);
      }
    }
  };
  const auto plain_sum = [&] {
    float sums[V] = {};
    each([&](int64_t, const float(&values)[V]) {
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += values[i];
    });
    return over_threads<P>(fold(sums, Add{}), Add{}, shared[0]);
  };

  if constexpr (K == Kind::kSum) {
    const float sum = plain_sum();
    if (thread == 0) put(a, row, a.reduction == Reduction::kMean ? sum / static_cast<float>(a.width) : sum);
  } else if constexpr (K == Kind::kVariance) {
    const float mean = plain_sum() / static_cast<float>(a.width);
    float squares[V] = {};
    each([&](int64_t v, const float(&values)[V]) {
      const auto here = static_cast<int>(a.width - v * V < V ? a.width - v * V : V);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const float difference = i < here ? values[i] - mean : 0.0f;
        squares[i] = fmaf(difference, difference, squares[i]);
      }
    });
    const float total = over_threads<P>(fold(squares, Add{}), Add{}, shared[1]);
    const double divisor = static_cast<double>(a.width) - a.correction;
    const float variance = static_cast<float>(static_cast<double>(total) / (divisor > 0 ? divisor : 0.0));
    if (thread == 0) put(a, row, a.reduction == Reduction::kStd ? sqrtf(variance) : variance);
  } else if constexpr (K == Kind::kLogSumExp) {
    float maxima[V];
#pragma unroll
    for (int i = 0; i < V; ++i) maxima[i] = -infinity;
    each([&](int64_t, const float(&values)[V]) {
#pragma unroll
      for (int i = 0; i < V; ++i) maxima[i] = fmaxf(maxima[i], values[i]);
    });
    float maximum = over_threads<P>(fold(maxima, Max{}), Max{}, shared[0]);
    if (fabsf(maximum) == infinity) maximum = 0.0f;  // infinities come out as they are
    float sums[V] = {};
    each([&](int64_t, const float(&values)[V]) {
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] += exp_for<T>(values[i] - maximum);
    });
    const float sum = over_threads<P>(fold(sums, Add{}), Add{}, shared[1]);
    if (thread == 0) put(a, row, logf(sum) + maximum);
  } else {
    const bool least = a.reduction == Reduction::kArgMin;
    uint32_t index = 0xffffffffu;
    if constexpr (N > 0) {  // the largest value, NaN above all, then the first place that has it
      float best[V];
#pragma unroll
      for (int i = 0; i < V; ++i) best[i] = least ? infinity : -infinity;
      const auto take = [&](auto op) {
        each([&](int64_t, const float(&values)[V]) {
#pragma unroll
          for (int i = 0; i < V; ++i) best[i] = op(best[i], values[i]);
        });
        return over_threads<P>(fold(best, op), op, shared[0]);
      };
      const float found = least ? take(MinOrNan{}) : take(MaxOrNan{});
      const bool nan = found != found;
      each([&](int64_t v, const float(&values)[V]) {
        uint32_t here = 0xffffffffu;
#pragma unroll
        for (int i = V - 1; i >= 0; --i) {
          if (nan ? values[i] != values[i] : values[i] == found) here = static_cast<uint32_t>(v * V + i);
        }
        index = min(index, here);  // what lies behind the row has a larger index than an equal of the row
      });
      index = over_threads<P>(index, Lower{}, shared_index);
    } else {  // a row that is read once: the first of the largest in each place of the thread's vectors; a NaN is kept
      const float sign = least ? -1.0f : 1.0f;
      float best[V];
      uint32_t vector[V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        best[i] = -infinity;
        vector[i] = static_cast<uint32_t>(thread);
      }
      each([&](int64_t v, const float(&values)[V]) {
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float value = values[i] * sign;
          if (!(value <= best[i]) && best[i] == best[i]) {
            best[i] = value;
            vector[i] = static_cast<uint32_t>(v);
          }
        }
      });
      unsigned long long key = 0;
#pragma unroll
      for (int i = 0; i < V; ++i) {
        const int64_t at = static_cast<int64_t>(vector[i]) * V + i;
        const unsigned long long candidate =
            (static_cast<unsigned long long>(ordered_bits(best[i])) << 32) | ~static_cast<uint32_t>(at);
        if (at < a.width && candidate > key) key = candidate;
      }
      index = ~static_cast<uint32_t>(over_threads<P>(key, Larger{}, shared_best));
    }
    if (thread == 0) static_cast<int64_t*>(a.y)[row] = static_cast<int64_t>(index);
  }
}

template <class T, Kind K>
void launch(const RowReduce& a, cudaStream_t stream) {
  const bool aligned = aligned_rows(a.x, a.x_stride, sizeof(T), a.rows);
  with_row_plan<T>(a.width, [&]<int P, int N>() {
    reduce_rows<T, K, P, K == Kind::kSum ? 0 : N><<<blocks_for<P>(a.rows), kBlock<P>, 0, stream>>>(a, aligned);
  });
}

}  // namespace

void row_reduce(const RowReduce& a, void* on) {
  if (a.rows == 0) return;
  const auto stream = static_cast<cudaStream_t>(on);
  with_dtype(a.dtype, [&]<class T>() {
    switch (a.reduction) {
      case Reduction::kSum:
      case Reduction::kMean:
        return launch<T, Kind::kSum>(a, stream);
      case Reduction::kVar:
      case Reduction::kStd:
        return launch<T, Kind::kVariance>(a, stream);
      case Reduction::kLogSumExp:
        return launch<T, Kind::kLogSumExp>(a, stream);
      default:
        return launch<T, Kind::kBest>(a, stream);
    }
  });
}

}  // namespace quartz::kernels::cuda
