#include "kernels/rotary.h"

#include <type_traits>
#include <vector>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

// The cosines and sines of one position, a pair's first and second element apart.
struct Table {
  std::vector<float> values;
  int64_t half;
  float *cos_a, *cos_b, *sin_a, *sin_b;

  explicit Table(int64_t pairs) : values(static_cast<size_t>(4 * pairs)), half(pairs) {
    cos_a = values.data(), cos_b = cos_a + half, sin_a = cos_b + half, sin_b = sin_a + half;
  }
};

template <class C>
void fill(const Rotary& a, const C* row, float* of_a, float* of_b) {
  const int64_t half = a.rotated / 2;
  for (int64_t p = 0; p < half; ++p) {
    of_a[p] = to_float(row[a.table_interleaved ? 2 * p : p]);
    of_b[p] = to_float(row[a.table_interleaved ? 2 * p + 1 : (a.table_half ? p : p + half)]);
  }
}

// The pairs from p on: first and second elements of at most 16.
template <class T>
QUARTZ_INLINE void load_pairs(const T* x, int64_t p, int64_t half, bool interleaved, Vec16& u, Vec16& v) {
  const int64_t n = half - p;
  if (!interleaved) {
    u = load16(x + p, n);
    v = load16(x + half + p, n);
    return;
  }
  alignas(64) float first[16] = {}, second[16] = {};
  for (int64_t i = 0; i < 16 && i < n; ++i) {
    first[i] = to_float(x[2 * (p + i)]);
    second[i] = to_float(x[2 * (p + i) + 1]);
  }
  u = load16(first);
  v = load16(second);
}
template <class T>
QUARTZ_INLINE void store_pairs(T* y, int64_t p, int64_t half, bool interleaved, const Vec16& u, const Vec16& v) {
  const int64_t n = half - p;
  if (!interleaved) {
    store16(y + p, u, n);
    store16(y + half + p, v, n);
    return;
  }
  T first[16], second[16];
  store16(first, u);
  store16(second, v);
  for (int64_t i = 0; i < 16 && i < n; ++i) {
    y[2 * (p + i)] = first[i];
    y[2 * (p + i) + 1] = second[i];
  }
}

template <class T, bool kStepwise>
void rotate_head(const Rotary& a, const Table& table, const T* x, T* y) {
  for (int64_t p = 0; p < table.half; p += 16) {
    const int64_t n = table.half - p;
    Vec16 u, v;
    load_pairs(x, p, table.half, a.in_interleaved, u, v);
    Vec16 uc = mul(u, load16(table.cos_a + p, n)), vc = mul(v, load16(table.cos_b + p, n));
    Vec16 vs = mul(v, load16((a.inverse ? table.sin_b : table.sin_a) + p, n));
    Vec16 us = mul(u, load16((a.inverse ? table.sin_a : table.sin_b) + p, n));
    if (kStepwise) uc = rounded16<T>(uc), vc = rounded16<T>(vc), vs = rounded16<T>(vs), us = rounded16<T>(us);
    const Vec16 first = a.inverse ? add(uc, vs) : sub(uc, vs), second = a.inverse ? sub(vc, us) : add(vc, us);
    store_pairs(y, p, table.half, a.out_interleaved, first, second);
  }
  for (int64_t i = a.rotated; i < a.head_size; ++i) y[i] = x[i];
}

template <class T, class C>
void positions(const Rotary& a, int64_t begin, int64_t end) {
  Table table(a.rotated / 2);
  for (int64_t place = begin; place < end; ++place) {
    const int64_t batch = place / a.positions, position = place % a.positions;
    const auto row = [&](const void* data, const int64_t(&stride)[2]) {
      return static_cast<const C*>(data) + batch * stride[0] + position * stride[1];
    };
    fill(a, row(a.cos, a.cos_stride), table.cos_a, table.cos_b);
    fill(a, row(a.sin, a.sin_stride), table.sin_a, table.sin_b);
    for (const auto& tensor : a.tensors) {
      if (tensor.x == nullptr) continue;
      const T* x = static_cast<const T*>(tensor.x) + batch * tensor.x_stride[0] + position * tensor.x_stride[1];
      T* y = static_cast<T*>(tensor.y) + batch * tensor.y_stride[0] + position * tensor.y_stride[1];
      for (int64_t head = 0; head < tensor.heads; ++head) {
        rotate_head<T, std::is_same_v<T, C>>(a, table, x + head * tensor.x_stride[2], y + head * tensor.y_stride[2]);
      }
    }
  }
}

}  // namespace

void rotary(const Rotary& a, const Parallel& parallel) {
  const int64_t heads = a.tensors[0].heads + (a.tensors[1].x != nullptr ? a.tensors[1].heads : 0);
  with_dtype(a.dtype, [&](auto x) {
    using T = decltype(x);
    parallel.run(a.batch * a.positions, row_grain(heads * a.head_size, 8192), [&](int64_t begin, int64_t end) {
      if (a.table_dtype == a.dtype) return positions<T, T>(a, begin, end);
      positions<T, float>(a, begin, end);
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
