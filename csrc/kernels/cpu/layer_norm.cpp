#include "kernels/layer_norm.h"

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T, class W>
void rows(const LayerNorm& a, int64_t begin, int64_t end) {
  const auto *weight = static_cast<const W*>(a.weight), *bias = static_cast<const W*>(a.bias);
  const auto width = static_cast<float>(a.width);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    T* y = static_cast<T*>(a.y) + row * a.width;
    Vec16 sums = zero16();
    for (int64_t k = 0; k < a.width; k += 16) sums = add(sums, load16(x + k, a.width - k));
    const float mean = sum_of(sums) / width;
    const Vec16 mean16 = broadcast16(mean);
    Vec16 squares = zero16();
    for (int64_t k = 0; k < a.width; k += 16) {
      const Vec16 difference = sub(load16_or(x + k, a.width - k, mean), mean16);
      squares = fma(difference, difference, squares);
    }
    const float scale = 1.0f / __builtin_sqrtf(sum_of(squares) / width + a.eps);
    if (a.mean != nullptr) {
      a.mean[row] = mean;
      a.rstd[row] = scale;
    }
    const Vec16 scale16 = broadcast16(scale);
    for (int64_t k = 0; k < a.width; k += 16) {
      const int64_t n = a.width - k;
      Vec16 value = mul(sub(load16(x + k, n), mean16), scale16);
      if (weight != nullptr) value = mul(value, load16(weight + k, n));
      if (bias != nullptr) value = add(value, load16(bias + k, n));
      store16(y + k, value, n);
    }
  }
}

}  // namespace

void layer_norm(const LayerNorm& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    with_dtype(a.weight_dtype, [&](auto w) {
      parallel.run(a.rows, row_grain(a.width),
                   [&](int64_t begin, int64_t end) { rows<decltype(x), decltype(w)>(a, begin, end); });
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
