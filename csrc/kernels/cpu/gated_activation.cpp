#include "kernels/gated_activation.h"

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int64_t kChunk = 2048;  // elements of a task

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

template <GluActivation A>
QUARTZ_INLINE Vec16 activate(const Vec16& g) {
  if constexpr (A == GluActivation::kSilu) {
    return div(g, add(one(), exp(negative(g))));
  } else if constexpr (A == GluActivation::kGelu) {
    return mul(g, normal_cdf(g));
  } else if constexpr (A == GluActivation::kGeluTanh) {  // (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
    const Vec16 cube = mul(mul(mul(g, g), g), broadcast16(0.044715f));
    return div(g, add(one(), exp(mul(add(g, cube), broadcast16(-0x1.988454p+0f)))));
  } else {
    return A == GluActivation::kRelu ? positive(g) : mul(positive(g), positive(g));
  }
}

template <class T, GluActivation A>
QUARTZ_INLINE Vec16 gated(const GatedActivation& a, Vec16 g, Vec16 u) {
  if constexpr (A == GluActivation::kClampedSwiglu) {
    const Vec16 limit = broadcast16(a.limit), alpha = broadcast16(a.alpha);
    g = min(limit, g);
    u = max(negative(limit), min(limit, u));
    if (!a.round_first) return mul(add(u, one()), div(g, add(one(), exp(negative(mul(alpha, g))))));
    const Vec16 gate = rounded16<T>(sigmoid(rounded16<T>(mul(g, alpha))));
    return mul(rounded16<T>(add(u, one())), rounded16<T>(mul(g, gate)));
  } else {
    Vec16 value = activate<A>(g);
    if (a.round_first) value = rounded16<T>(value);
    return mul(value, u);
  }
}

// Gates and ups of 16 elements out of 32 that alternate.
template <class T>
QUARTZ_INLINE void load_pairs(const T* p, int64_t count, Vec16& g, Vec16& u) {
  alignas(64) float gates[16] = {}, ups[16] = {};
  for (int64_t i = 0; i < 16 && i < count; ++i) {
    gates[i] = to_float(p[2 * i]);
    ups[i] = to_float(p[2 * i + 1]);
  }
  g = load16(gates);
  u = load16(ups);
}

template <class T, GluActivation A>
void chunk(const GatedActivation& a, int64_t row, int64_t begin, int64_t end) {
  const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
  const T* up = static_cast<const T*>(a.up) + row * a.up_stride;
  T* y = static_cast<T*>(a.y) + row * a.width;
  for (int64_t k = begin; k < end; k += 16) {
    Vec16 g, u;
    if (a.interleaved) {
      load_pairs(gate + 2 * k, end - k, g, u);
    } else {
      g = load16(gate + k, end - k);
      u = load16(up + k, end - k);
    }
    store16(y + k, gated<T, A>(a, g, u), end - k);
  }
}

template <class T, GluActivation A>
void run(const GatedActivation& a, const Parallel& parallel) {
  const int64_t chunks = (a.width + kChunk - 1) / kChunk;
  const int64_t grain = a.width < kChunk ? row_grain(a.width, 2 * kChunk) : 2;
  parallel.run(a.rows * chunks, grain, [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t begin = task % chunks * kChunk, end = begin + kChunk < a.width ? begin + kChunk : a.width;
      chunk<T, A>(a, task / chunks, begin, end);
    }
  });
}

}  // namespace

void gated_activation(const GatedActivation& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    using T = decltype(x);
    switch (a.activation) {
      case GluActivation::kSilu:
        return run<T, GluActivation::kSilu>(a, parallel);
      case GluActivation::kGelu:
        return run<T, GluActivation::kGelu>(a, parallel);
      case GluActivation::kGeluTanh:
        return run<T, GluActivation::kGeluTanh>(a, parallel);
      case GluActivation::kRelu:
        return run<T, GluActivation::kRelu>(a, parallel);
      case GluActivation::kReluSquared:
        return run<T, GluActivation::kReluSquared>(a, parallel);
      case GluActivation::kClampedSwiglu:
        return run<T, GluActivation::kClampedSwiglu>(a, parallel);
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
