// The arithmetic of attention that every path shares; attention_cuda.h states it.
#pragma once

#include <cstdint>

#include "kernels/cuda/hopper.cuh"

namespace quartz::kernels::cuda::attention_kernels {

QUARTZ_DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

QUARTZ_DEVICE float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What a maximum is subtracted as: minus infinity (nothing seen so far) as 0, so that no NaN arises.
QUARTZ_DEVICE float finite_maximum(float m) { return m == minus_infinity() ? 0.0f : m; }

// Row sums and maxima of one query row, over the columns of one lane until a chunk's end.
struct RowState {
  float m, l;
  QUARTZ_DEVICE void reset() {
    m = minus_infinity();
    l = 0.0f;
  }
};

// Sum over the four lanes that share a row.
QUARTZ_DEVICE float sum_of_lanes(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

// One tile of one row (ROW 0 or 1 of the fragment): scores become p; returns the factor for what was accumulated.
template <int ROW>
QUARTZ_DEVICE float softmax_tile(float (&s)[64], RowState& row, float c) {
  constexpr int o = 2 * ROW;
  float part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = fmaxf(s[4 * i + o], s[4 * i + o + 1]);
#pragma unroll
  for (int j = 4; j < 16; ++j) part[j % 4] = fmaxf(part[j % 4], fmaxf(s[4 * j + o], s[4 * j + o + 1]));
  float x = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  const float n = fmaxf(row.m, x), finite = finite_maximum(n);
  const float factor = exp2_approximate(__fmul_rn(__fsub_rn(row.m, finite), c));
  const float offset = -__fmul_rn(finite, c);
  row.m = n;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    s[4 * j + o] = exp2_approximate(__fmaf_rn(s[4 * j + o], c, offset));
    s[4 * j + o + 1] = exp2_approximate(__fmaf_rn(s[4 * j + o + 1], c, offset));
  }
  float even = s[o], odd = s[o + 1];
#pragma unroll
  for (int j = 1; j < 16; ++j) {
    even = __fadd_rn(even, s[4 * j + o]);
    odd = __fadd_rn(odd, s[4 * j + o + 1]);
  }
  row.l = __fmaf_rn(row.l, factor, __fadd_rn(even, odd));
  return factor;
}

// Folds the chunk (m, l) into (total): returns the factors of what was folded before and of the chunk.
struct FoldFactors {
  float before, chunk;
};
QUARTZ_DEVICE FoldFactors fold_row(RowState& total, float m, float l, float c) {
  const float n = fmaxf(total.m, m), finite = finite_maximum(n);
  const FoldFactors f{exp2_approximate(__fmul_rn(__fsub_rn(total.m, finite), c)),
                      exp2_approximate(__fmul_rn(__fsub_rn(m, finite), c))};
  total.l = __fmaf_rn(l, f.chunk, __fmul_rn(total.l, f.before));
  total.m = n;
  return f;
}
QUARTZ_DEVICE float fold_value(float before, float chunk, FoldFactors f) {
  return __fmaf_rn(chunk, f.chunk, __fmul_rn(before, f.before));
}

// 1 / L, and 0 for a row without any key.
QUARTZ_DEVICE float inverse_sum(float l) { return l == 0.0f ? 0.0f : __frcp_rn(l); }
QUARTZ_DEVICE float result(float o, float inverse) { return __fmaf_rn(o, inverse, 0.0f); }

// The natural logarithm of the sum of exponentials; scale / log2(e) makes c.
QUARTZ_DEVICE float natural_logsumexp(const RowState& total, float c) {
  if (total.l == 0.0f) return minus_infinity();
  return (total.m * c + log2f(total.l)) * 0.6931471805599453f;
}

// cap tanh(s scale / cap) in the caller's units: c1 = 2 log2(e) scale / cap.
QUARTZ_DEVICE float soft_capped(float s, float c1, float cap) {
  const float e = exp2_approximate(-fabsf(s) * c1);
  const float t = __fmul_rn(cap, __fdiv_rn(1.0f - e, 1.0f + e));
  return copysignf(t, s);
}

}  // namespace quartz::kernels::cuda::attention_kernels
