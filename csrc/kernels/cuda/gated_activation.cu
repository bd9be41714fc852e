#include "kernels/gated_activation.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, GluActivation A>
__device__ __forceinline__ float activate(float g) {
  if constexpr (A == GluActivation::kSilu) {
    return divide_for<T>(g, 1.0f + exp_for<T>(-g));
  } else if constexpr (A == GluActivation::kGelu) {
    return 0.5f * g * erfcf(g * -0x1.6a09e6p-1f);
  } else if constexpr (A == GluActivation::kGeluTanh) {  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
    const float twice = 1.59576912160573073f * fmaf(0.044715f * g * g, g, g);
    return divide_for<T>(g, 1.0f + exp_for<T>(-twice));
  } else {
    const float positive = g > 0.0f || g != g ? g : 0.0f;
    return A == GluActivation::kRelu ? positive : positive * positive;
  }
}

template <class T, GluActivation A>
__device__ __forceinline__ float gated(const GatedActivation& a, float g, float u) {
  if constexpr (A == GluActivation::kClampedSwiglu) {
    g = g > a.limit ? a.limit : g;
    u = u > a.limit ? a.limit : (u < -a.limit ? -a.limit : u);
    if (!a.round_first) return (u + 1.0f) * divide_for<T>(g, 1.0f + exp_for<T>(-a.alpha * g));
    const float sigmoid = rounded<T>(divide_for<T>(1.0f, 1.0f + exp_for<T>(-rounded<T>(g * a.alpha))));
    return rounded<T>(u + 1.0f) * rounded<T>(g * sigmoid);
  } else {
    const float value = activate<T, A>(g);
    return (a.round_first ? rounded<T>(value) : value) * u;
  }
}

// kItems vectors a thread: two where there are enough to fill the processor.
template <class T, GluActivation A, int kItems>
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
    float g[V], u[V];
    widen(first[j], g);
    widen(second[j], u);
    if (a.interleaved) {
      float both[2 * V];
#pragma unroll
      for (int i = 0; i < V; ++i) {
        both[i] = g[i];
        both[V + i] = u[i];
      }
#pragma unroll
      for (int i = 0; i < V; ++i) {
        g[i] = both[2 * i];
        u[i] = both[2 * i + 1];
      }
    }
#pragma unroll
    for (int i = 0; i < V; ++i) g[i] = gated<T, A>(a, g[i], u[i]);
    store_pack<T>(static_cast<T*>(a.y) + rows[j] * a.width, places[j], a.width, aligned, narrow<T>(g));
  }
}

template <class T, GluActivation A>
void launch(const GatedActivation& a, cudaStream_t stream) {
  constexpr int64_t kSize = sizeof(T);
  const bool aligned = aligned_rows(a.gate, a.gate_stride, kSize, a.rows) &&
                       aligned_rows(a.y, a.width, kSize, a.rows) &&
                       (a.interleaved || aligned_rows(a.up, a.up_stride, kSize, a.rows));
  const int64_t vectors = (a.width + kVector<T> - 1) / kVector<T>, total = vectors * a.rows;
  const auto blocks = [&](int items) {
    return static_cast<unsigned>((total + kThreads * items - 1) / (kThreads * items));
  };
  if (total < int64_t{1} << 19) {
    gated_vectors<T, A, 1><<<blocks(1), kThreads, 0, stream>>>(a, aligned, vectors, total);
  } else {
    gated_vectors<T, A, 2><<<blocks(2), kThreads, 0, stream>>>(a, aligned, vectors, total);
  }
}

}  // namespace

void gated_activation(const GatedActivation& a, void* on) {
  if (a.rows == 0 || a.width == 0) return;
  const auto stream = static_cast<cudaStream_t>(on);
  with_dtype(a.dtype, [&]<class T>() {
    switch (a.activation) {
      case GluActivation::kSilu:
        return launch<T, GluActivation::kSilu>(a, stream);
      case GluActivation::kGelu:
        return launch<T, GluActivation::kGelu>(a, stream);
      case GluActivation::kGeluTanh:
        return launch<T, GluActivation::kGeluTanh>(a, stream);
      case GluActivation::kRelu:
        return launch<T, GluActivation::kRelu>(a, stream);
      case GluActivation::kReluSquared:
        return launch<T, GluActivation::kReluSquared>(a, stream);
      case GluActivation::kClampedSwiglu:
        return launch<T, GluActivation::kClampedSwiglu>(a, stream);
    }
  });
}

}  // namespace quartz::kernels::cuda
