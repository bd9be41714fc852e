#include "kernels/row_reduce.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr float kMinusInfinity = -__builtin_huge_valf();

// Reductions of one kind share a kernel; the rest is decided at run time.
enum class Kind { kSum, kVariance, kLogSumExp, kBest };

struct Larger {
  __device__ __forceinline__ unsigned long long operator()(unsigned long long a, unsigned long long b) const {
    return a > b ? a : b;
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

template <class T, Kind K, int P>
__global__ void __launch_bounds__(kBlock<P>) reduce_rows(RowReduce a, bool aligned) {
  constexpr int V = kVector<T>;
  __shared__ float shared[2][P / 32];
  __shared__ unsigned long long shared_best[P / 32];
  const int64_t row = row_of_thread<P>();
  if (row >= a.rows) return;
  const int thread = threadIdx.x % P;
  const int64_t vectors = (a.width + V - 1) / V;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  const auto each = [&](T fill, const auto& body) {
#pragma unroll 4
    for (int64_t v = thread; v < vectors; v += P) body(v, load_pack<T>(x, v, a.width, aligned, fill));
  };
  const auto sum_of = [&](T fill, float* places, const auto& add) {
    float sums[V] = {};
    each(fill, [&](int64_t v, const Pack<T>& pack) {
#pragma unroll
      for (int i = 0; i < V; ++i) sums[i] = add(sums[i], widen(pack.item[i]), v * V + i);
    });
    return over_threads<P>(fold(sums, Add{}), Add{}, places);
  };

  if constexpr (K == Kind::kSum) {
    const float sum = sum_of(T{}, shared[0], [](float total, float value, int64_t) { return total + value; });
    if (thread == 0) put(a, row, a.reduction == Reduction::kMean ? sum / static_cast<float>(a.width) : sum);
  } else if constexpr (K == Kind::kVariance) {
    const float mean = sum_of(T{}, shared[0], [](float total, float value, int64_t) { return total + value; }) /
                       static_cast<float>(a.width);
    const float squares = sum_of(T{}, shared[1], [&](float total, float value, int64_t k) {
      const float difference = k < a.width ? value - mean : 0.0f;
      return fmaf(difference, difference, total);
    });
    const double divisor = static_cast<double>(a.width) - a.correction;
    const float variance = static_cast<float>(static_cast<double>(squares) / (divisor > 0 ? divisor : 0.0));
    if (thread == 0) put(a, row, a.reduction == Reduction::kStd ? sqrtf(variance) : variance);
  } else if constexpr (K == Kind::kLogSumExp) {
    const T lowest = narrow<T>(kMinusInfinity);
    float maxima[V];
#pragma unroll
    for (int i = 0; i < V; ++i) maxima[i] = kMinusInfinity;
    each(lowest, [&](int64_t, const Pack<T>& pack) {
#pragma unroll
      for (int i = 0; i < V; ++i) maxima[i] = fmaxf(maxima[i], widen(pack.item[i]));
    });
    float maximum = over_threads<P>(fold(maxima, Max{}), Max{}, shared[0]);
    if (fabsf(maximum) == __builtin_huge_valf()) maximum = 0.0f;  // infinities come out as they are
    const float sum =
        sum_of(lowest, shared[1], [&](float total, float value, int64_t) { return total + expf(value - maximum); });
    if (thread == 0) put(a, row, logf(sum) + maximum);
  } else {
    const bool least = a.reduction == Reduction::kArgMin;
    unsigned long long best = 0;
    each(T{}, [&](int64_t v, const Pack<T>& pack) {
#pragma unroll
      for (int i = 0; i < V; ++i) {
        uint32_t order = ordered_bits(widen(pack.item[i]));
        if (least && order != 0xffffffffu) order = ~order;  // NaN stays above all
        const auto index = static_cast<uint32_t>(v * V + i);
        const unsigned long long key = (static_cast<unsigned long long>(order) << 32) | ~index;
        if (v * V + i < a.width && key > best) best = key;
      }
    });
    best = over_threads<P>(best, Larger{}, shared_best);
    if (thread == 0) static_cast<int64_t*>(a.y)[row] = static_cast<int64_t>(~static_cast<uint32_t>(best));
  }
}

template <class T, Kind K>
void launch(const RowReduce& a, cudaStream_t stream) {
  const bool aligned = aligned_rows(a.x, a.x_stride, sizeof(T), a.rows);
  const int64_t vectors = (a.width + kVector<T> - 1) / kVector<T>;
  if (vectors <= 128) {
    reduce_rows<T, K, 32><<<blocks_for<32>(a.rows), kBlock<32>, 0, stream>>>(a, aligned);
  } else if (vectors <= 1024) {
    reduce_rows<T, K, 128><<<blocks_for<128>(a.rows), kBlock<128>, 0, stream>>>(a, aligned);
  } else {
    reduce_rows<T, K, 1024><<<blocks_for<1024>(a.rows), kBlock<1024>, 0, stream>>>(a, aligned);
  }
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
