#include "kernels/rms_norm.h"

#include <algorithm>
#include <type_traits>

#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

// Scaled and rounded as the module of the model would, before the product with the weight.
template <class T>
QUARTZ_INLINE Vec16 rounded(const Vec16& a) {
  if constexpr (std::is_same_v<T, float>) {
    return a;
  } else {
    T buffer[16];
    store16(buffer, a);
    return load16(buffer);
  }
}

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
      if (a.round_first) value = rounded<T>(value);
      if (weight != nullptr) value = mul(value, add(offset, load16(weight + k, n)));
      store16(y + k, value, n);
    }
  }
}

template <class T>
void typed(const RmsNorm& a, const Parallel& parallel) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, a.width));
  parallel.run(a.rows, grain, [&](int64_t begin, int64_t end) {
    switch (a.weight_dtype) {
      case DType::kFloat32:
        return rows<T, float>(a, begin, end);
      case DType::kFloat16:
        return rows<T, Float16>(a, begin, end);
      default:
        return rows<T, BFloat16>(a, begin, end);
    }
  });
}

}  // namespace

void rms_norm(const RmsNorm& a, const Parallel& parallel) {
  switch (a.dtype) {
    case DType::kFloat32:
      return typed<float>(a, parallel);
    case DType::kFloat16:
      return typed<Float16>(a, parallel);
    default:
      return typed<BFloat16>(a, parallel);
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
