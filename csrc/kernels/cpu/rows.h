// What the CPU kernels over rows share: the order of sums (kernels/row_reduce.h states it), maxima, ends of rows.
#pragma once

#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {

using kernels::to_float;  // of single elements, beside the vectors' of simd.h

// The first `count` (at most 16) elements; `fill` behind them, where memory is not touched.
template <class T>
QUARTZ_INLINE Vec16 load16_or(const T* p, int64_t count, float fill) {
  if (count >= 16) return load16(p);
  alignas(64) float values[16];
  for (int64_t i = 0; i < 16; ++i) values[i] = i < count ? to_float(p[i]) : fill;
  return load16(values);
}

// 64 running sums with totals, so that long rows lose little.
struct Sum64 {
  Vec16 part[4], total[4];
  int additions;
};
QUARTZ_INLINE Sum64 no_sum() {
  Sum64 s;
  for (int q = 0; q < 4; ++q) s.part[q] = s.total[q] = zero16();
  s.additions = 0;
  return s;
}
QUARTZ_INLINE void next_block(Sum64& s) {  // after each block of 64 elements
  if (++s.additions < 128) return;
  for (int q = 0; q < 4; ++q) {
    s.total[q] = add(s.total[q], s.part[q]);
    s.part[q] = zero16();
  }
  s.additions = 0;
}
QUARTZ_INLINE float result_of(Sum64& s) {
  for (int q = 0; q < 4; ++q) s.total[q] = add(s.total[q], s.part[q]);
  return sum_of(add(add(s.total[0], s.total[2]), add(s.total[1], s.total[3])));
}

// accumulate(sum, x) over a row; lanes behind its end get `fill`, which must add nothing.
template <class T, class F>
QUARTZ_INLINE float sum_row(const T* x, int64_t width, float fill, const F& accumulate) {
  Sum64 s = no_sum();
  int64_t k = 0;
  for (; k + 64 <= width; k += 64) {
    QUARTZ_UNROLL
    for (int q = 0; q < 4; ++q) s.part[q] = accumulate(s.part[q], load16(x + k + 16 * q));
    next_block(s);
  }
  for (int q = 0; q < 4; ++q) {
    const int64_t place = k + 16 * q;
    if (place < width) s.part[q] = accumulate(s.part[q], load16_or(x + place, width - place, fill));
  }
  return result_of(s);
}

// The maximum of a row's numbers; a NaN may hide others.
template <class T>
QUARTZ_INLINE float max_row(const T* x, int64_t width) {
  const float lowest = -__builtin_huge_valf();
  Vec16 best[4];
  for (int q = 0; q < 4; ++q) best[q] = broadcast16(lowest);
  int64_t k = 0;
  for (; k + 64 <= width; k += 64) {
    QUARTZ_UNROLL
    for (int q = 0; q < 4; ++q) best[q] = max(best[q], load16(x + k + 16 * q));
  }
  for (; k < width; k += 16) best[0] = max(best[0], load16_or(x + k, width - k, lowest));
  alignas(64) float values[16];
  store16(values, max(max(best[0], best[2]), max(best[1], best[3])));
  float result = values[0];
  for (int i = 1; i < 16; ++i) result = values[i] > result || result != result ? values[i] : result;
  return result;
}

QUARTZ_INLINE bool any(Mask m) {
#if defined(__AVX512F__)
  return m != 0;
#else
  return _mm256_movemask_ps(m) != 0;
#endif
}
// Whether a number of `a` is above (below: swap them) the one of `b`.
QUARTZ_INLINE bool any_less(const Vec16& a, const Vec16& b) {
  bool found = false;
  QUARTZ_PARTS found = found | any(less(a.part[i], b.part[i]));
  return found;
}
QUARTZ_INLINE bool any_equal(const Vec16& a, const Vec16& b) {
  bool found = false;
  QUARTZ_PARTS found = found | any(equal(a.part[i], b.part[i]));
  return found;
}
QUARTZ_INLINE bool any_nan(const Vec16& a) {
  bool found = false;
  QUARTZ_PARTS found = found | any(is_nan(a.part[i]));
  return found;
}

// As a tensor of dtype T would keep it.
template <class T>
QUARTZ_INLINE Vec16 rounded16(const Vec16& a) {
  if constexpr (sizeof(T) == 4) {
    return a;
  } else {
    T buffer[16];
    store16(buffer, a);
    return load16(buffer);
  }
}

template <class Body>
QUARTZ_INLINE void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float{});
    case DType::kFloat16:
      return body(Float16{});
    default:
      return body(BFloat16{});
  }
}

// Rows a task should have at least, so that it is worth a thread.
QUARTZ_INLINE int64_t row_grain(int64_t width, int64_t elements = 16384) {
  const int64_t rows = elements / (width > 0 ? width : 1);
  return rows > 0 ? rows : 1;
}

}  // namespace quartz::kernels::QUARTZ_ISA
