#include "kernels/gated_activation.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256, kItems = 2;  // vectors of a thread

template <Activation A>
__device__ __forceinline__ float activate(float g) {
  if constexpr (A == Activation::kSilu) {
    return g / (1.0f + expf(-g));
  } else if constexpr (A == Activation::kGelu) {
    return g * 0.5f * (1.0f + erff(g * 0.70710678118654752f));
  } else if constexpr (A == Activation::kGeluTanh) {
    const float inner = 0.79788456080286536f * fmaf(0.044715f * g * g, g, g);
    return g * 0.5f * (1.0f + tanhf(inner));
  } else {
    const float positive = g > 0.0f || g != g ? g : 0.0f;
    return A == Activation::kRelu ? positive : positive * positive;
  }
}

template <class T, Activation A>
__device__ __forceinline__ float gated(const GatedActivation& a, float g, float u) {
  if constexpr (A == Activation::kClampedSwiglu) {
    g = g > a.limit ? a.limit : g;
    u = u > a.limit ? a.limit : (u < -a.limit ? -a.limit : u);
    if (!a.round_first) return (u + 1.0f) * (g / (1.0f + expf(-a.alpha * g)));
    const float sigmoid = rounded<T>(1.0f / (1.0f + expf(-rounded<T>(g * a.alpha))));
    return rounded<T>(u + 1.0f) * rounded<T>(g * sigmoid);
  } else {
    float value = activate<A>(g);
    if (a.round_first) value = rounded<T>(value);
    return value * u;
  }
}

template <class T, Activation A>
__global__ void __launch_bounds__(kThreads)
    gated_vectors(GatedActivation a, bool aligned, int64_t vectors, int64_t total) {
  constexpr int V = kVector<T>;
  Pack<T> first[kItems], second[kItems];
  int64_t rows[kItems], places[kItems];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * (kThreads * kItems) + threadIdx.x;
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    const int64_t item = begin + j * kThreads;
    if (item >= total) break;
    if (total <= 0x7fffffff) {
      const auto small = static_cast<uint32_t>(item), divisor = static_cast<uint32_t>(vectors);
      rows[j] = small / divisor;
      places[j] = small % divisor;
    } else {
      rows[j] = item / vectors;
      places[j] = item % vectors;
    }
    const T* gate = static_cast<const T*>(a.gate) + rows[j] * a.gate_stride;
    if (a.interleaved) {
      first[j] = load_pack<T>(gate, 2 * places[j], 2 * a.width, aligned, T{});
      second[j] = load_pack<T>(gate, 2 * places[j] + 1, 2 * a.width, aligned, T{});
    } else {
      const T* up = static_cast<const T*>(a.up) + rows[j] * a.up_stride;
      first[j] = load_pack<T>(gate, places[j], a.width, aligned, T{});
      second[j] = load_pack<T>(up, places[j], a.width, aligned, T{});
    }
  }
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    if (begin + j * kThreads >= total) break;
    Pack<T> result;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      float g, u;
      if (a.interleaved) {
        const auto& half = i < V / 2 ? first[j] : second[j];
        g = widen(half.item[2 * (i % (V / 2))]);
        u = widen(half.item[2 * (i % (V / 2)) + 1]);
      } else {
        g = widen(first[j].item[i]);
        u = widen(second[j].item[i]);
      }
      result.item[i] = narrow<T>(gated<T, A>(a, g, u));
    }
    store_pack<T>(static_cast<T*>(a.y) + rows[j] * a.width, places[j], a.width, aligned, result);
  }
}

template <class T, Activation A>
void launch(const GatedActivation& a, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(T);
  const bool aligned = aligned_rows(a.gate, a.gate_stride, kSize, a.rows) &&
                       aligned_rows(a.y, a.width, kSize, a.rows) &&
                       (a.interleaved || aligned_rows(a.up, a.up_stride, kSize, a.rows));
  const int64_t vectors = (a.width + kVector<T> - 1) / kVector<T>, total = vectors * a.rows;
  const auto blocks = static_cast<unsigned>((total + kThreads * kItems - 1) / (kThreads * kItems));
  gated_vectors<T, A><<<blocks, kThreads, 0, stream>>>(a, aligned, vectors, total);
}

}  // namespace

void gated_activation(const GatedActivation& a, void* on) {
  if (a.rows == 0 || a.width == 0) return;
  const auto stream = static_cast<cudaStream_t>(on);
  with_dtype(a.dtype, [&]<class T>() {
    switch (a.activation) {
      case Activation::kSilu:
        return launch<T, Activation::kSilu>(a, stream);
      case Activation::kGelu:
        return launch<T, Activation::kGelu>(a, stream);
      case Activation::kGeluTanh:
        return launch<T, Activation::kGeluTanh>(a, stream);
      case Activation::kRelu:
        return launch<T, Activation::kRelu>(a, stream);
      case Activation::kReluSquared:
        return launch<T, Activation::kReluSquared>(a, stream);
      case Activation::kClampedSwiglu:
        return launch<T, Activation::kClampedSwiglu>(a, stream);
    }
  });
}

}  // namespace quartz::kernels::cuda
