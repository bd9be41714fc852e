// A block works on one position of one sequence; a thread keeps the cosines and sines of V pairs and takes these pairs
// of several heads.
#include "kernels/rotary.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 128;

// V pairs at a time where everything is aligned (V elements in 16 bytes), else single pairs.
template <class T, int V>
struct Elements {
  T item[V];
  __device__ __forceinline__ void load(const T* p) {
    if constexpr (V > 1) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
      memcpy(item, &raw, 16);
    } else {
      item[0] = *p;
    }
  }
  __device__ __forceinline__ void store(T* p) const {
    if constexpr (V > 1) {
      uint4 raw;
      memcpy(&raw, item, 16);
      *reinterpret_cast<uint4*>(p) = raw;
    } else {
      *p = item[0];
    }
  }
};

// V pairs (a, b) from two runs of V elements that lie one behind the other.
template <class T, int V>
__device__ __forceinline__ void split(Elements<T, V>& a, Elements<T, V>& b) {
  if constexpr (V > 1) {
    T both[2 * V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      both[i] = a.item[i];
      both[V + i] = b.item[i];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a.item[i] = both[2 * i];
      b.item[i] = both[2 * i + 1];
    }
  }
}
template <class T, int V>
__device__ __forceinline__ void join(Elements<T, V>& a, Elements<T, V>& b) {
  if constexpr (V > 1) {
    T both[2 * V];
#pragma unroll
    for (int i = 0; i < V; ++i) {
      both[2 * i] = a.item[i];
      both[2 * i + 1] = b.item[i];
    }
#pragma unroll
    for (int i = 0; i < V; ++i) {
      a.item[i] = both[i];
      b.item[i] = both[V + i];
    }
  }
}

template <class T, class C, int V>
__global__ void __launch_bounds__(kThreads) rotate_positions(Rotary a) {
  constexpr bool kStepwise = __is_same(T, C);
  const int64_t batch = blockIdx.x / a.positions, position = blockIdx.x % a.positions, half = a.rotated / 2;
  const int pair_chunks = static_cast<int>(half / V),
            chunks = pair_chunks + static_cast<int>((a.head_size - a.rotated) / V);
  const int groups = max(1, kThreads / chunks);  // heads at a time
  for (int item = threadIdx.x; item < chunks * groups; item += kThreads) {
    const int chunk = item % chunks;
    const bool copies = chunk >= pair_chunks;
    const int64_t pair = static_cast<int64_t>(chunk) * V;
    float cos_a[V], cos_b[V], sin_a[V], sin_b[V];
    if (!copies) {
      const auto table = [&](const void* data, const int64_t(&stride)[2], float(&of_a)[V], float(&of_b)[V]) {
        const C* row = static_cast<const C*>(data) + batch * stride[0] + position * stride[1];
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const int64_t p = pair + i;
          of_a[i] = widen(row[a.table_interleaved ? 2 * p : p]);
          of_b[i] = widen(row[a.table_interleaved ? 2 * p + 1 : (a.table_half ? p : p + half)]);
        }
      };
      table(a.cos, a.cos_stride, cos_a, cos_b);
      table(a.sin, a.sin_stride, sin_a, sin_b);
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const RotaryTensor& tensor = a.tensors[t];
      if (tensor.x == nullptr) continue;
      const T* x = static_cast<const T*>(tensor.x) + batch * tensor.x_stride[0] + position * tensor.x_stride[1];
      T* y = static_cast<T*>(tensor.y) + batch * tensor.y_stride[0] + position * tensor.y_stride[1];
#pragma unroll 4
      for (int64_t head = item / chunks; head < tensor.heads; head += groups) {
        const T* from = x + head * tensor.x_stride[2];
        T* to = y + head * tensor.y_stride[2];
        Elements<T, V> first, second;
        if (copies) {
          const int64_t place = a.rotated + (chunk - pair_chunks) * V;
          first.load(from + place);
          first.store(to + place);
          continue;
        }
        first.load(from + (a.in_interleaved ? 2 * pair : pair));
        second.load(from + (a.in_interleaved ? 2 * pair + V : pair + half));
        if (a.in_interleaved) split<T, V>(first, second);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const float p = widen(first.item[i]), q = widen(second.item[i]);
          // forward: a' = a cos_a - b sin_a, b' = b cos_b + a sin_b; inverse: a' = a cos_a + b sin_b, ...
          float pc = __fmul_rn(p, cos_a[i]), qs = __fmul_rn(q, a.inverse ? -sin_b[i] : sin_a[i]);
          float qc = __fmul_rn(q, cos_b[i]), ps = __fmul_rn(p, a.inverse ? -sin_a[i] : sin_b[i]);
          if (kStepwise) {
            pc = rounded<T>(pc), qs = rounded<T>(qs), qc = rounded<T>(qc), ps = rounded<T>(ps);
          }
          first.item[i] = narrow<T>(__fsub_rn(pc, qs));
          second.item[i] = narrow<T>(__fadd_rn(qc, ps));
        }
        if (a.out_interleaved) join<T, V>(first, second);
        first.store(to + (a.out_interleaved ? 2 * pair : pair));
        second.store(to + (a.out_interleaved ? 2 * pair + V : pair + half));
      }
    }
  }
}

template <class T>
bool vectors_fit(const Rotary& a) {
  constexpr int V = kVector<T>;
  if (a.rotated / 2 % V != 0 || a.head_size % V != 0) return false;
  for (const auto& tensor : a.tensors) {
    if (tensor.x == nullptr) continue;
    if (!aligned16(tensor.x) || !aligned16(tensor.y)) return false;
    for (int i = 0; i < 3; ++i) {
      if (tensor.x_stride[i] % V != 0 || tensor.y_stride[i] % V != 0) return false;
    }
  }
  return true;
}

template <class T, class C>
void launch(const Rotary& a, unsigned blocks, cudaStream_t stream) {
  if (vectors_fit<T>(a)) {
    rotate_positions<T, C, kVector<T>><<<blocks, kThreads, 0, stream>>>(a);
  } else {
    rotate_positions<T, C, 1><<<blocks, kThreads, 0, stream>>>(a);
  }
}

}  // namespace

void rotary(const Rotary& a, void* on) {
  if (a.batch == 0 || a.positions == 0) return;
  const auto stream = static_cast<cudaStream_t>(on);
  const auto blocks = static_cast<unsigned>(a.batch * a.positions);
  with_dtype(a.dtype, [&]<class T>() {
    if (a.table_dtype == a.dtype) return launch<T, T>(a, blocks, stream);
    launch<T, float>(a, blocks, stream);
  });
}

}  // namespace quartz::kernels::cuda
