// Activations on 16 lanes, for the kernels of gated MLPs and of single elements.
#pragma once

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {

QUARTZ_INLINE Vec16 one() { return broadcast16(1.0f); }
QUARTZ_INLINE Vec16 negative(const Vec16& a) { return sub(zero16(), a); }
QUARTZ_INLINE Vec16 sigmoid(const Vec16& a) { return div(one(), add(one(), exp(negative(a)))); }

// (1 + erf(g / sqrt 2)) / 2. With z = |g| / sqrt 2: erfc(z) = exp(-z^2) R(1 / (1 + 0.4 z)), R a polynomial fitted on
// 0 <= z <= 6 (relative error 3.3e-8 before rounding).
QUARTZ_INLINE Vec16 normal_cdf(const Vec16& g) {
  constexpr float kR[] = {0x1.0e39c2p-13f, 0x1.c944a2p-3f, 0x1.f61628p-3f,  0x1.e149c8p-4f, 0x1.b9d504p-2f,
                          -0x1.6ca26cp-2f, 0x1.362fe0p-1f, -0x1.34a608p-2f, 0x1.76729ap-6f, 0x1.715d60p-7f};
  const Vec16 z = mul(max(g, negative(g)), broadcast16(0x1.6a09e6p-1f));
  const Vec16 t = div(one(), fma(z, broadcast16(0.4f), one()));
  Vec16 r = broadcast16(kR[9]);
  for (int i = 8; i >= 0; --i) r = fma(r, t, broadcast16(kR[i]));
  const Vec16 tail = mul(mul(r, broadcast16(0.5f)), exp(negative(mul(z, z))));
  Vec16 result = sub(one(), tail);
  QUARTZ_PARTS result.part[i] = select(less(g.part[i], zero()), tail.part[i], result.part[i]);
  return result;
}

QUARTZ_INLINE Vec16 positive(const Vec16& g) { return max(zero16(), g); }  // NaN stays

QUARTZ_INLINE Vec16 silu(const Vec16& g) { return div(g, add(one(), exp(negative(g)))); }
QUARTZ_INLINE Vec16 gelu(const Vec16& g) { return mul(g, normal_cdf(g)); }
QUARTZ_INLINE Vec16 gelu_tanh(const Vec16& g) {  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
  const Vec16 cube = mul(mul(mul(g, g), g), broadcast16(0.044715f));
  return div(g, add(one(), exp(mul(add(g, cube), broadcast16(-0x1.988454p+0f)))));
}

}  // namespace quartz::kernels::QUARTZ_ISA
