#include "kernels/rms_norm.h"

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T, class W>
void rows(const RmsNorm& a, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const W*>(a.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.width;
    if (a.residual != nullptr) {
      const T* residual = static_cast<const T*>(a.residual) + row * a.residual_stride;
      T* sum = static_cast<T*>(a.sum) + row * a.width;
      for (int64_t k = 0; k < a.width; k += 16) {
        const int64_t n = a.width - k;
        store16(sum + k, add(load16(x + k, n), load16(residual + k, n)), n);
      }
      x = sum;
    }
    Vec16 squares = zero16();
    for (int64_t k = 0; k < a.width; k += 16) {
      const Vec16 value = load16(x + k, a.width - k);
      squares = fma(value, value, squares);
    }
    const float mean = sum_of(squares) / static_cast<float>(a.width);
    const Vec16 scale = broadcast16(1.0f / __builtin_sqrtf(mean + a.eps)), offset = broadcast16(a.weight_offset);
    for (int64_t k = 0; k < a.width; k += 16) {
      const int64_t n = a.width - k;
      Vec16 value = mul(load16(x + k, n), scale);
      if (a.round_first) value = rounded16<T>(value);
      if (weight != nullptr) value = mul(value, add(offset, load16(weight + k, n)));
      store16(y + k, value, n);
    }
  }
}

}  // namespace

void rms_norm(const RmsNorm& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto t) {
    with_dtype(a.weight_dtype, [&](auto w) {
      parallel.run(a.rows, row_grain(a.width),
                   [&](int64_t begin, int64_t end) { rows<decltype(t), decltype(w)>(a, begin, end); });
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
