#include "kernels/softmax.h"

#include <type_traits>
#include <vector>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T, class Y>
void row_of_logarithms(const T* x, Y* y, int64_t width, float maximum) {
  const Vec16 m = broadcast16(maximum);
  const float sum = sum_row(x, width, -__builtin_huge_valf(),
                            [&](const Vec16& total, const Vec16& value) { return add(total, exp(sub(value, m))); });
  const Vec16 log_sum = broadcast16(log_f32(sum));
  for (int64_t k = 0; k < width; k += 16) {
    store16(y + k, sub(sub(load16(x + k, width - k), m), log_sum), width - k);
  }
}

// `powers` has room for the row; it may be y.
template <class T, class Y>
void row_of_probabilities(const T* x, Y* y, float* powers, int64_t width, float maximum) {
  const Vec16 m = broadcast16(maximum);
  Sum64 s = no_sum();
  int64_t k = 0;
  for (; k + 64 <= width; k += 64) {
    QUARTZ_UNROLL
    for (int q = 0; q < 4; ++q) {
      const Vec16 power = exp(sub(load16(x + k + 16 * q), m));
      store16(powers + k + 16 * q, power);
      s.part[q] = add(s.part[q], power);
    }
    next_block(s);
  }
  for (int q = 0; q < 4; ++q) {
    const int64_t place = k + 16 * q, n = width - place;
    if (n <= 0) break;
    const Vec16 power = exp(sub(load16_or(x + place, n, -__builtin_huge_valf()), m));
    store16(powers + place, power, n);
    s.part[q] = add(s.part[q], power);
  }
  const Vec16 scale = broadcast16(1.0f / result_of(s));
  for (k = 0; k < width; k += 16) store16(y + k, mul(load16(powers + k, width - k), scale), width - k);
}

template <class T, class Y>
void rows(const Softmax& a, int64_t begin, int64_t end) {
  std::vector<float> scratch(std::is_same_v<Y, float> || a.log ? 0 : static_cast<size_t>(a.width));
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    Y* y = static_cast<Y*>(a.y) + row * a.width;
    const float maximum = max_row(x, a.width);
    if (a.log) {
      row_of_logarithms(x, y, a.width, maximum);
    } else if constexpr (std::is_same_v<Y, float>) {
      row_of_probabilities(x, y, y, a.width, maximum);
    } else {
      row_of_probabilities(x, y, scratch.data(), a.width, maximum);
    }
  }
}

}  // namespace

void softmax(const Softmax& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    using T = decltype(x);
    parallel.run(a.rows, row_grain(a.width, 4096), [&](int64_t begin, int64_t end) {
      if (a.y_dtype == a.dtype) return rows<T, T>(a, begin, end);
      rows<T, float>(a, begin, end);
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
