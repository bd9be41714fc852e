// What the kernels over rows share: vector access, sums and maxima over the threads of a row.
//
// P threads work on a row. Vector v (16 bytes: V elements) belongs to thread v mod P; a thread takes its vectors in
// ascending order and keeps V sums, one for each place in the vector. Those are added by the tree i + V / 2, ..., i +
// 1, the threads of a warp by the tree of distances 16, 8, 4, 2, 1, the warps by such a tree again. P depends on the
// row length and the dtype alone, and a row that is not aligned is read element by element into the same places, so the
// order is a function of the row length.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/dtype.h"

namespace quartz::kernels::cuda {

template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
struct alignas(16) Pack {
  T item[kVector<T>];
};

// from_float with the processor's own conversion; NaN becomes the canonical one.
template <class T>
__device__ __forceinline__ T narrow(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    T result;
    if constexpr (__is_same(T, BFloat16)) {
      const __nv_bfloat16 half = __float2bfloat16_rn(value);
      memcpy(&result, &half, 2);
    } else {
      const __half half = __float2half_rn(value);
      memcpy(&result, &half, 2);
    }
    return result;
  }
}
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(BFloat16 value) { return to_float(value); }
__device__ __forceinline__ float widen(Float16 value) {
  __half half;
  memcpy(&half, &value, 2);
  return __half2float(half);
}
template <class T>
__device__ __forceinline__ float rounded(float value) {
  return widen(narrow<T>(value));
}

// 16-bit elements are converted in pairs, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t narrow_pair(float first, float second) {
  uint32_t pair;
  if constexpr (__is_same(T, BFloat16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  }
  return pair;
}
template <class T>
__device__ __forceinline__ float2 widen_pair(uint32_t pair) {
  if constexpr (__is_same(T, BFloat16)) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    __half2 halves;
    memcpy(&halves, &pair, 4);
    return __half22float2(halves);
  }
}

// The elements of a vector together.
template <class T>
__device__ __forceinline__ void widen(const Pack<T>& pack, float (&out)[kVector<T>]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) out[i] = pack.item[i];
  } else {
    uint32_t pairs[kVector<T> / 2];
    memcpy(pairs, &pack, sizeof pairs);
#pragma unroll
    for (int i = 0; i < kVector<T> / 2; ++i) {
      const float2 both = widen_pair<T>(pairs[i]);
      out[2 * i] = both.x;
      out[2 * i + 1] = both.y;
    }
  }
}
template <class T>
__device__ __forceinline__ Pack<T> narrow(const float (&values)[kVector<T>]) {
  Pack<T> pack;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kVector<T>; ++i) pack.item[i] = values[i];
  } else {
    uint32_t pairs[kVector<T> / 2];
#pragma unroll
    for (int i = 0; i < kVector<T> / 2; ++i) pairs[i] = narrow_pair<T>(values[2 * i], values[2 * i + 1]);
    memcpy(&pack, pairs, sizeof pairs);
  }
  return pack;
}

// exp for results of type T: the processor's approximation (relative error below 1e-6 up to |x| = 8, 2e-5 at 150) where
// rounding to 16 bits hides its error, else the library's.
template <class T>
__device__ __forceinline__ float exp_for(float x) {
  return sizeof(T) == 2 ? __expf(x) : expf(x);
}
template <class T>
__device__ __forceinline__ float divide_for(float a, float b) {
  return sizeof(T) == 2 ? __fdividef(a, b) : a / b;
}

template <class T>
constexpr DType kDTypeOf = sizeof(T) == 4           ? DType::kFloat32
                           : __is_same(T, BFloat16) ? DType::kBFloat16
                                                    : DType::kFloat16;

// Vector `v` of a row. What lies behind `width` is `fill` and is not read. `kWritten`: this kernel has written the row.
template <class T, bool kWritten = false>
__device__ __forceinline__ Pack<T> load_pack(const T* row, int64_t v, int64_t width, bool aligned, T fill) {
  constexpr int V = kVector<T>;
  const int64_t begin = v * V;
  Pack<T> pack;
  if (aligned && begin + V <= width) {
    const auto* source = reinterpret_cast<const uint4*>(row + begin);
    const uint4 raw = kWritten ? *source : __ldg(source);
    memcpy(&pack, &raw, 16);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) pack.item[i] = begin + i < width ? row[begin + i] : fill;
  }
  return pack;
}
template <class T>
__device__ __forceinline__ void store_pack(T* row, int64_t v, int64_t width, bool aligned, const Pack<T>& pack) {
  constexpr int V = kVector<T>;
  const int64_t begin = v * V;
  if (aligned && begin + V <= width) {
    uint4 raw;
    memcpy(&raw, &pack, 16);
    *reinterpret_cast<uint4*>(row + begin) = raw;
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (begin + i < width) row[begin + i] = pack.item[i];
    }
  }
}

// N consecutive elements of a parameter vector whose dtype is known at run time only.
template <int N>
__device__ __forceinline__ void load_parameters(const void* data, DType dtype, int64_t begin, int64_t width,
                                                bool aligned, float (&out)[N]) {
  const auto typed = [&]<class W>(const W* p) {
    if (aligned && begin + N <= width && N % kVector<W> == 0) {
#pragma unroll
      for (int j = 0; j < N / kVector<W>; ++j) {
        float part[kVector<W>];
        widen(load_pack<W>(p + begin, j, N, true, W{}), part);
#pragma unroll
        for (int i = 0; i < kVector<W>; ++i) out[j * kVector<W> + i] = part[i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = begin + i < width ? widen(p[begin + i]) : 0.0f;
    }
  };
  switch (dtype) {
    case DType::kFloat32:
      return typed(static_cast<const float*>(data));
    case DType::kFloat16:
      return typed(static_cast<const Float16*>(data));
    default:
      return typed(static_cast<const BFloat16*>(data));
  }
}

struct Add {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {  // of numbers; NaN is lost
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <int N, class Op>
__device__ __forceinline__ float fold(float (&values)[N], Op op) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] = op(values[i], values[i + half]);
  }
  return values[0];
}

// Over the P threads of the row; every thread gets the result. `shared` has P / 32 places that no other reduction uses.
template <int P, class T, class Op>
__device__ __forceinline__ T over_threads(T value, Op op, T* shared) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  if constexpr (P > 32) {
    constexpr int kWarps = P / 32;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = shared[threadIdx.x % kWarps];
#pragma unroll
    for (int distance = kWarps / 2; distance > 0; distance /= 2) {
      value = op(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
  }
  return value;
}

inline bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }
// Whether every row of `stride` elements begins at a multiple of 16 bytes.
inline bool aligned_rows(const void* p, int64_t stride, int64_t element_size, int64_t rows) {
  return aligned16(p) && (rows == 1 || stride * element_size % 16 == 0);
}

template <int P>
constexpr int kBlock = P < 128 ? 128 : P;
template <int P>
constexpr int kRowsOfBlock = kBlock<P> / P;
template <int P>
__device__ __forceinline__ int64_t row_of_thread() {
  return static_cast<int64_t>(blockIdx.x) * kRowsOfBlock<P> + (P < 128 ? threadIdx.x / P : 0);
}
template <int P>
unsigned blocks_for(int64_t rows) {
  return static_cast<unsigned>((rows + kRowsOfBlock<P> - 1) / kRowsOfBlock<P>);
}

// Calls body<P, N>() with the number of threads of a row and of the vectors that each keeps in registers; N = 0 where
// they would be too many, then rows are read again for each pass.
template <class T, class Body>
void with_row_plan(int64_t width, const Body& body) {
  const int64_t vectors = (width + kVector<T> - 1) / kVector<T>;
  if (vectors <= 64) return body.template operator()<32, 2>();
  if (vectors <= 256) return body.template operator()<128, 2>();
  if (vectors <= 512) return body.template operator()<256, 2>();
  if (vectors <= 1024) return body.template operator()<512, 2>();
  if (vectors <= 4096) return body.template operator()<1024, 4>();
  return body.template operator()<1024, 0>();
}

template <class Body>
void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body.template operator()<float>();
    case DType::kFloat16:
      return body.template operator()<Float16>();
    default:
      return body.template operator()<BFloat16>();
  }
}

}  // namespace quartz::kernels::cuda
