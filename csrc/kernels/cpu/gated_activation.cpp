#include "kernels/gated_activation.h"

#include "kernels/cpu/activations.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int64_t kChunk = 2048;  // elements of a task

template <GluActivation A>
QUARTZ_INLINE Vec16 activate(const Vec16& g) {
  if constexpr (A == GluActivation::kSilu) {
    return silu(g);
  } else if constexpr (A == GluActivation::kGelu) {
    return gelu(g);
  } else if constexpr (A == GluActivation::kGeluTanh) {
    return gelu_tanh(g);
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
