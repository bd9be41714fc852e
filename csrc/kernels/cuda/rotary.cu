// A block works on one position of one sequence; a thread keeps the cosines and sines of V pairs and takes these pairs
// of several heads.
#include "kernels/rotary.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 64;

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

// Of two runs of V 16-bit elements, those at even places and those at odd ones; and back.
__device__ __forceinline__ void split_words(uint32_t (&a)[4], uint32_t (&b)[4]) {
  const uint32_t both[8] = {a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = __byte_perm(both[2 * i], both[2 * i + 1], 0x5410);
    b[i] = __byte_perm(both[2 * i], both[2 * i + 1], 0x7632);
  }
}
__device__ __forceinline__ void join_words(uint32_t (&a)[4], uint32_t (&b)[4]) {
  uint32_t both[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    both[2 * i] = __byte_perm(a[i], b[i], 0x5410);
    both[2 * i + 1] = __byte_perm(a[i], b[i], 0x7632);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a[i] = both[i];
    b[i] = both[4 + i];
  }
}
template <class T, int V, class Body>
__device__ __forceinline__ void as_words(Elements<T, V>& a, Elements<T, V>& b, const Body& body) {
  uint32_t first[4], second[4];
  memcpy(first, a.item, 16);
  memcpy(second, b.item, 16);
  body(first, second);
  memcpy(a.item, first, 16);
  memcpy(b.item, second, 16);
}

// V pairs (a, b) from two runs of V elements that lie one behind the other.
template <class T, int V>
__device__ __forceinline__ void split(Elements<T, V>& a, Elements<T, V>& b) {
  if constexpr (V == 8) {
    as_words(a, b, [](auto& x, auto& y) { split_words(x, y); });
  } else if constexpr (V > 1) {
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
  if constexpr (V == 8) {
    as_words(a, b, [](auto& x, auto& y) { join_words(x, y); });
  } else if constexpr (V > 1) {
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

// V elements that lie one behind the other.
template <int V, class C>
__device__ __forceinline__ void read_table(const C* p, C (&out)[V]) {
  constexpr int kBytes = V * static_cast<int>(sizeof(C)), kWidth = kBytes % 16 == 0 ? 16 : 8;
#pragma unroll
  for (int i = 0; i < kBytes / kWidth; ++i) {
    if constexpr (kWidth == 16) {
      const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p) + i);
      memcpy(reinterpret_cast<char*>(out) + 16 * i, &raw, 16);
    } else {
      const uint2 raw = __ldg(reinterpret_cast<const uint2*>(p) + i);
      memcpy(reinterpret_cast<char*>(out) + 8 * i, &raw, 8);
    }
  }
}

// What a row of a table has for the pairs from `pair` on: for their first elements and for their second ones.
template <int V, class C>
__device__ __forceinline__ void read_pairs(const Rotary& a, const C* row, int64_t pair, bool aligned, C (&of_a)[V],
                                           C (&of_b)[V]) {
  const int64_t half = a.rotated / 2;
  if (V > 1 && aligned && a.table_interleaved) {
    C both[2 * V];
    read_table<2 * V>(row + 2 * pair, both);
#pragma unroll
    for (int i = 0; i < V; ++i) {
      of_a[i] = both[2 * i];
      of_b[i] = both[2 * i + 1];
    }
  } else if (V > 1 && aligned) {
    read_table<V>(row + pair, of_a);
    read_table<V>(row + (a.table_half ? pair : pair + half), of_b);
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const int64_t p = pair + i;
      of_a[i] = row[a.table_interleaved ? 2 * p : p];
      of_b[i] = row[a.table_interleaved ? 2 * p + 1 : (a.table_half ? p : p + half)];
    }
  }
}

// Cosines and sines of V pairs, prepared for a' = a cos_a - b sin_a, b' = b cos_b + a sin_b: the inverse is the same
// with -sin_b for sin_a and -sin_a for sin_b.
template <class T, class C, int V>
struct Angles {
  static constexpr bool kStepwise = __is_same(T, C);
  float cos_a[V], cos_b[V], sin_a[V], sin_b[V];

  __device__ __forceinline__ void set(bool inverse, const C (&ca)[V], const C (&cb)[V], const C (&sa)[V],
                                      const C (&sb)[V]) {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      cos_a[i] = widen(ca[i]);
      cos_b[i] = widen(cb[i]);
      sin_a[i] = inverse ? -widen(sb[i]) : widen(sa[i]);
      sin_b[i] = inverse ? -widen(sa[i]) : widen(sb[i]);
    }
  }
  __device__ __forceinline__ void turn(Elements<T, V>& first, Elements<T, V>& second) const {
#pragma unroll
    for (int i = 0; i < V; ++i) {
      const float p = widen(first.item[i]), q = widen(second.item[i]);
      float pc = __fmul_rn(p, cos_a[i]), qs = __fmul_rn(q, sin_a[i]);
      float qc = __fmul_rn(q, cos_b[i]), ps = __fmul_rn(p, sin_b[i]);
      if (kStepwise) {
        pc = rounded<T>(pc), qs = rounded<T>(qs), qc = rounded<T>(qc), ps = rounded<T>(ps);
      }
      first.item[i] = narrow<T>(__fsub_rn(pc, qs));
      second.item[i] = narrow<T>(__fadd_rn(qc, ps));
    }
  }
};

template <class T>
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {  // each product rounded to T
  uint32_t result;
  if constexpr (__is_same(T, BFloat16)) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

// The same for 16-bit elements and tables, in pairs of elements.
template <class T>
requires(sizeof(T) == 2) struct Angles<T, T, 8> {
  uint32_t cos_a[4], cos_b[4], sin_a[4], sin_b[4];

  __device__ __forceinline__ void set(bool inverse, const T (&ca)[8], const T (&cb)[8], const T (&sa)[8],
                                      const T (&sb)[8]) {
    memcpy(cos_a, ca, 16);
    memcpy(cos_b, cb, 16);
    memcpy(sin_a, inverse ? sb : sa, 16);
    memcpy(sin_b, inverse ? sa : sb, 16);
    const uint32_t signs = inverse ? 0x80008000u : 0u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sin_a[i] ^= signs;
      sin_b[i] ^= signs;
    }
  }
  __device__ __forceinline__ void turn(Elements<T, 8>& first, Elements<T, 8>& second) const {
    uint32_t p[4], q[4];
    memcpy(p, first.item, 16);
    memcpy(q, second.item, 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pc = widen_pair<T>(multiply_pairs<T>(p[i], cos_a[i])),
                   qs = widen_pair<T>(multiply_pairs<T>(q[i], sin_a[i]));
      const float2 qc = widen_pair<T>(multiply_pairs<T>(q[i], cos_b[i])),
                   ps = widen_pair<T>(multiply_pairs<T>(p[i], sin_b[i]));
      p[i] = narrow_pair<T>(__fsub_rn(pc.x, qs.x), __fsub_rn(pc.y, qs.y));
      q[i] = narrow_pair<T>(__fadd_rn(qc.x, ps.x), __fadd_rn(qc.y, ps.y));
    }
    memcpy(first.item, p, 16);
    memcpy(second.item, q, 16);
  }
};

// Of the pairs that a thread turns: V from `pair`, or V / 2 from `pair` and V / 2 from `other`.
template <int V, bool kRuns, class C>
__device__ __forceinline__ void read_both(const Rotary& a, const C* row, int64_t pair, int64_t other, bool aligned,
                                          C (&of_a)[V], C (&of_b)[V]) {
  if constexpr (kRuns) {
    C low_a[V / 2], low_b[V / 2], high_a[V / 2], high_b[V / 2];
    read_pairs<V / 2>(a, row, pair, aligned, low_a, low_b);
    read_pairs<V / 2>(a, row, other, aligned, high_a, high_b);
#pragma unroll
    for (int i = 0; i < V / 2; ++i) {
      of_a[i] = low_a[i];
      of_b[i] = low_b[i];
      of_a[V / 2 + i] = high_a[i];
      of_b[V / 2 + i] = high_b[i];
    }
  } else {
    read_pairs<V>(a, row, pair, aligned, of_a, of_b);
  }
}

// Where the pairs lie: in halves on both sides; interleaved on both sides, then a thread has two runs of V / 2 pairs,
// so that neighbouring threads have neighbouring runs; anything.
enum class Style { kHalves, kRuns, kAny };

template <class T, class C, int V, Style kStyle>
__global__ void __launch_bounds__(kThreads) rotate_positions(Rotary a, bool aligned_tables) {
  constexpr bool kRuns = kStyle == Style::kRuns;
  const int64_t batch = blockIdx.x / a.positions, position = blockIdx.x % a.positions, half = a.rotated / 2;
  const int pair_chunks = static_cast<int>(half / V),
            chunks = pair_chunks + static_cast<int>((a.head_size - a.rotated) / V);
  const int groups = max(1, kThreads / chunks);  // heads at a time
  const C* cos = static_cast<const C*>(a.cos) + batch * a.cos_stride[0] + position * a.cos_stride[1];
  const C* sin = static_cast<const C*>(a.sin) + batch * a.sin_stride[0] + position * a.sin_stride[1];
  for (int item = threadIdx.x; item < chunks * groups; item += kThreads) {
    const int chunk = item % chunks;
    const bool copies = chunk >= pair_chunks;
    const int64_t pair = static_cast<int64_t>(chunk) * (kRuns ? V / 2 : V);
    const int64_t other = kRuns ? pair + half / 2 : pair;
    const int64_t second_run = kRuns ? 2 * other : 2 * pair + V;  // where the thread's second interleaved run begins
    const bool in_interleaved = kStyle == Style::kAny ? a.in_interleaved : kRuns,
               out_interleaved = kStyle == Style::kAny ? a.out_interleaved : kRuns;
    Angles<T, C, V> angles;
    if (!copies) {
      C cos_a[V], cos_b[V], sin_a[V], sin_b[V];
      read_both<V, kRuns>(a, cos, pair, other, aligned_tables, cos_a, cos_b);
      read_both<V, kRuns>(a, sin, pair, other, aligned_tables, sin_a, sin_b);
      angles.set(a.inverse, cos_a, cos_b, sin_a, sin_b);
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
        first.load(from + (in_interleaved ? 2 * pair : pair));
        second.load(from + (in_interleaved ? second_run : pair + half));
        if (in_interleaved) split<T, V>(first, second);
        angles.turn(first, second);
        if (out_interleaved) join<T, V>(first, second);
        first.store(to + (out_interleaved ? 2 * pair : pair));
        second.store(to + (out_interleaved ? second_run : pair + half));
      }
    }
  }
}

template <class C>
bool tables_fit(const Rotary& a) {
  if (a.rotated / 2 % kVector<C> != 0 || !aligned16(a.cos) || !aligned16(a.sin)) return false;
  for (const auto* strides : {a.cos_stride, a.sin_stride}) {
    if (strides[0] % kVector<C> != 0 || strides[1] % kVector<C> != 0) return false;
  }
  return true;
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
    const auto run = [&](auto kernel) { kernel<<<blocks, kThreads, 0, stream>>>(a, tables_fit<C>(a)); };
    if (a.in_interleaved && a.out_interleaved) return run(rotate_positions<T, C, kVector<T>, Style::kRuns>);
    if (!a.in_interleaved && !a.out_interleaved) return run(rotate_positions<T, C, kVector<T>, Style::kHalves>);
    run(rotate_positions<T, C, kVector<T>, Style::kAny>);
  } else {
    rotate_positions<T, C, 1, Style::kAny><<<blocks, kThreads, 0, stream>>>(a, false);
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
