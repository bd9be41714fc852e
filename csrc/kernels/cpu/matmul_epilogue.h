// From the sums of a product to its results: scale, bias, activation, one rounding.
#pragma once

#include <type_traits>

#include "kernels/cpu/simd.h"
#include "kernels/matmul.h"

namespace quartz::kernels::QUARTZ_ISA {

// v Phi(v) with Phi(-|v|) = exp(-v^2 / 2) (c1 t + ... + c9 t^9), t = 1 / (1 + 0.4 |v| / sqrt(2)): a fit of our own to
// erfc(z) exp(z^2) / 2 with a relative error of 7.5e-8.
QUARTZ_INLINE Vec gelu(Vec v) {
  const Vec magnitude = min(broadcast(16.0f), as_float(bit_and(as_int(v), broadcast_int(0x7fffffff))));
  const Vec t = div(broadcast(1.0f), fma(magnitude, broadcast(0x1.21a186p-2f), broadcast(1.0f)));
  Vec p = fma(broadcast(0x1.590ac4p-6f), t, broadcast(-0x1.280cc4p-4f));
  p = fma(p, t, broadcast(0x1.7c12b4p-5f));
  p = fma(p, t, broadcast(0x1.3ed09ap-5f));
  p = fma(p, t, broadcast(0x1.637fbcp-5f));
  p = fma(p, t, broadcast(0x1.85e686p-4f));
  p = fma(p, t, broadcast(0x1.9f0d12p-4f));
  p = fma(p, t, broadcast(0x1.cf8852p-4f));
  p = mul(fma(p, t, broadcast(0x1.ce1caep-4f)), t);
  // exp(-(s + e)) = exp(-s) (1 - e) with s + e = v^2 / 2 exactly.
  const Vec half = mul(magnitude, broadcast(0.5f)), square = mul(magnitude, half);
  const Vec error = fma(magnitude, half, sub(zero(), square));
  const Vec tail = mul(mul(p, exp(sub(zero(), square))), sub(broadcast(1.0f), error));
  return mul(v, select(less(v, zero()), tail, sub(broadcast(1.0f), tail)));
}

QUARTZ_INLINE Vec sigmoid_times(Vec v, Vec argument) {  // v / (1 + exp(-argument))
  return div(v, add(broadcast(1.0f), exp(sub(zero(), argument))));
}

QUARTZ_INLINE Vec activate(Vec v, Activation activation) {
  switch (activation) {
    case Activation::kRelu:
      return max(zero(), v);
    case Activation::kSilu:
      return sigmoid_times(v, v);
    case Activation::kGelu:
      return gelu(v);
    case Activation::kGeluTanh: {  // 2 sqrt(2/pi) = 1.5957691, times 0.044715: 0.071354814
      const Vec square = mul(v, v);
      return sigmoid_times(v, mul(v, fma(square, broadcast(0.071354814f), broadcast(1.5957691f))));
    }
    case Activation::kGeluQuick:
      return sigmoid_times(v, mul(v, broadcast(1.702f)));
    default:
      return v;
  }
}

// A result, rounded: every NaN as the same one. With kNative bfloat16 is rounded by the processor's instruction, which
// takes subnormal numbers for zero; where they are flushed anyway that makes no difference.
template <bool kNative, class O>
QUARTZ_INLINE void store_result(O* to, Vec16 value, int64_t count) {
  QUARTZ_PARTS value.part[i] = select(is_nan(value.part[i]), broadcast(float_of_bits(kQuietNan)), value.part[i]);
#if defined(__AVX512BF16__)
  if constexpr (kNative && std::is_same_v<O, BFloat16>) {
    const auto rounded = (__m256i)_mm512_cvtneps_pbh(value.part[0]);
    if (count >= 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), rounded);
    } else {
      _mm256_mask_storeu_epi16(to, first(count), rounded);
    }
    return;
  }
#endif
  store16(to, value, count);
}

// `rows` x `columns` sums, `pitch` floats apart, to out; T is the type of bias, O of out, both at the first element.
template <bool kNative, class T, class O>
void emit(const Matmul& a, const float* sums, int64_t pitch, int64_t rows, int64_t columns, const T* bias, O* out) {
  const auto &bias_strides = a.bias_strides, &out_strides = a.out_strides;
  const bool scaled = a.alpha != 1.0f, active = a.activation != Activation::kNone;
  const Vec16 alpha = broadcast16(a.alpha), beta = broadcast16(a.beta);
  if (!scaled && !active && bias == nullptr && out_strides.column == 1) {
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = sums + row * pitch;
      O* to = out + row * out_strides.row;
      int64_t column = 0;
      for (; column + 16 <= columns; column += 16) store_result<kNative>(to + column, load16(from + column), 16);
      if (column < columns) store_result<kNative>(to + column, load16(from + column), columns - column);
    }
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += 16) {
      const int64_t n = columns - column, most = n < 16 ? n : 16;
      Vec16 value = load16(sums + row * pitch + column);  // the buffer has whole panels
      if (scaled) value = mul(alpha, value);
      if (bias != nullptr) {
        const T* from = bias + row * bias_strides.row + column * bias_strides.column;
        Vec16 addend;
        if (bias_strides.column == 1) {
          addend = load16(from, n);
        } else if (bias_strides.column == 0) {
          addend = broadcast16(kernels::to_float(*from));
        } else {
          T buffer[16] = {};
          for (int64_t i = 0; i < most; ++i) buffer[i] = from[i * bias_strides.column];
          addend = load16(buffer);
        }
        value = add(value, mul(beta, addend));
      }
      if (active) {
        QUARTZ_PARTS value.part[i] = activate(value.part[i], a.activation);
      }
      O* to = out + row * out_strides.row + column * out_strides.column;
      if (out_strides.column == 1) {
        store_result<kNative>(to, value, n);
      } else {
        O buffer[16];
        store_result<kNative>(buffer, value, 16);
        for (int64_t i = 0; i < most; ++i) to[i * out_strides.column] = buffer[i];
      }
    }
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
