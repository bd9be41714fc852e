#include "kernels/row_reduce.h"

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T>
float sum(const T* x, int64_t width) {
  return sum_row(x, width, 0.0f, [](const Vec16& total, const Vec16& value) { return add(total, value); });
}

template <class T>
float variance(const T* x, int64_t width, double correction) {
  const float mean = sum(x, width) / static_cast<float>(width);
  const Vec16 mean16 = broadcast16(mean);
  const float squares = sum_row(x, width, mean, [&](const Vec16& total, const Vec16& value) {
    const Vec16 difference = sub(value, mean16);
    return fma(difference, difference, total);
  });
  const double divisor = static_cast<double>(width) - correction;
  return static_cast<float>(static_cast<double>(squares) / (divisor > 0 ? divisor : 0.0));
}

template <class T>
float logsumexp(const T* x, int64_t width) {
  float maximum = max_row(x, width);
  if (__builtin_isinf(maximum)) maximum = 0.0f;  // infinities come out as they are
  const Vec16 m = broadcast16(maximum);
  const float total = sum_row(x, width, -__builtin_huge_valf(),
                              [&](const Vec16& t, const Vec16& value) { return add(t, exp(sub(value, m))); });
  return log_f32(total) + maximum;
}

template <class T>
int64_t first_where(const T* x, int64_t width, const Vec16& wanted, bool nan) {
  for (int64_t k = 0; k < width; k += 16) {
    const Vec16 value = load16_or(x + k, width - k, nan ? 0.0f : __builtin_nanf(""));
    if (!(nan ? any_nan(value) : any_equal(value, wanted))) continue;
    alignas(64) float values[16], targets[16];
    store16(values, value);
    store16(targets, wanted);
    for (int64_t i = 0; i < 16; ++i) {
      if (nan ? values[i] != values[i] : values[i] == targets[i]) return k + i;
    }
  }
  return 0;
}

template <class T>
int64_t best(const T* x, int64_t width, bool largest) {
  const float sign = largest ? 1.0f : -1.0f;
  const Vec16 sign16 = broadcast16(sign), lowest = broadcast16(-__builtin_huge_valf());
  Vec16 best[4] = {lowest, lowest, lowest, lowest}, nan = zero16();  // NaN - NaN and 0 - 0 tell which
  int64_t k = 0;
  for (; k + 64 <= width; k += 64) {
    QUARTZ_UNROLL
    for (int q = 0; q < 4; ++q) {
      const Vec16 value = mul(load16(x + k + 16 * q), sign16);
      best[q] = max(best[q], value);
      nan = fma(value, zero16(), nan);  // infinity too: looked at below
    }
  }
  for (; k < width; k += 16) {
    const Vec16 value =
        mul(load16_or(x + k, width - k, largest ? -__builtin_huge_valf() : __builtin_huge_valf()), sign16);
    best[0] = max(best[0], value);
    if (any_nan(value)) nan = value;
  }
  if (any_nan(nan)) {  // a NaN or an infinity
    for (int64_t i = 0; i < width; i += 16) {
      if (any_nan(load16_or(x + i, width - i, 0.0f))) return first_where(x + i, width - i, nan, true) + i;
    }
  }
  alignas(64) float values[16];
  store16(values, max(max(best[0], best[2]), max(best[1], best[3])));
  float top = values[0];
  for (int i = 1; i < 16; ++i) top = values[i] > top ? values[i] : top;
  return first_where(x, width, broadcast16(top * sign), false);
}

template <class T>
void rows(const RowReduce& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    float value = 0.0f;
    switch (a.reduction) {
      case Reduction::kSum:
        value = sum(x, a.width);
        break;
      case Reduction::kMean:
        value = sum(x, a.width) / static_cast<float>(a.width);
        break;
      case Reduction::kVar:
        value = variance(x, a.width, a.correction);
        break;
      case Reduction::kStd:
        value = __builtin_sqrtf(variance(x, a.width, a.correction));
        break;
      case Reduction::kLogSumExp:
        value = logsumexp(x, a.width);
        break;
      default:
        static_cast<int64_t*>(a.y)[row] = best(x, a.width, a.reduction == Reduction::kArgMax);
        continue;
    }
    with_dtype(a.y_dtype, [&](auto y) {
      using Y = decltype(y);
      static_cast<Y*>(a.y)[row] = from_float<Y>(value);
    });
  }
}

}  // namespace

void row_reduce(const RowReduce& a, const Parallel& parallel) {
  const bool costly = a.reduction == Reduction::kLogSumExp;
  with_dtype(a.dtype, [&](auto x) {
    parallel.run(a.rows, row_grain(a.width, costly ? 4096 : 32768),
                 [&](int64_t begin, int64_t end) { rows<decltype(x)>(a, begin, end); });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
