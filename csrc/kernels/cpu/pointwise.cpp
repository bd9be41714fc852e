#include "kernels/pointwise.h"

#include "kernels/cpu/activations.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

// log(1 + e) where 1 + e rounds: corrected by what the rounding has lost.
QUARTZ_INLINE Vec16 softplus(const Vec16& x, float beta, float threshold) {
  const Vec16 scaled = mul(x, broadcast16(beta)), e = exp(scaled), u = add(one(), e);
  Vec16 result;
  QUARTZ_PARTS {
    const Vec lost = sub(u.part[i], broadcast(1.0f));
    const Vec exact = mul(log(u.part[i]), div(e.part[i], lost));
    const Vec value = select(equal(lost, zero()), e.part[i], exact);
    result.part[i] = select(less(broadcast(threshold), scaled.part[i]), x.part[i], div(value, broadcast(beta)));
  }
  return result;
}

template <PointwiseFunction F>
QUARTZ_INLINE Vec16 apply(const Pointwise& a, const Vec16& x) {
  if constexpr (F == PointwiseFunction::kSigmoid) {
    return sigmoid(x);
  } else if constexpr (F == PointwiseFunction::kSilu) {
    return silu(x);
  } else if constexpr (F == PointwiseFunction::kGelu) {
    return gelu(x);
  } else if constexpr (F == PointwiseFunction::kGeluTanh) {
    return gelu_tanh(x);
  } else if constexpr (F == PointwiseFunction::kRsqrt) {
    Vec16 result;
    QUARTZ_PARTS result.part[i] = div(broadcast(1.0f), sqrt(x.part[i]));
    return result;
  } else {
    return softplus(x, a.beta, a.threshold);
  }
}

template <class T, PointwiseFunction F>
void run(const Pointwise& a, const Parallel& parallel) {
  parallel.run(a.count, 8192, [&](int64_t begin, int64_t end) {
    const T* x = static_cast<const T*>(a.x);
    T* y = static_cast<T*>(a.y);
    for (int64_t k = begin; k < end; k += 16) store16(y + k, apply<F>(a, load16(x + k, end - k)), end - k);
  });
}

}  // namespace

void pointwise(const Pointwise& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    using T = decltype(x);
    switch (a.function) {
      case PointwiseFunction::kSigmoid:
        return run<T, PointwiseFunction::kSigmoid>(a, parallel);
      case PointwiseFunction::kSilu:
        return run<T, PointwiseFunction::kSilu>(a, parallel);
      case PointwiseFunction::kRsqrt:
        return run<T, PointwiseFunction::kRsqrt>(a, parallel);
      case PointwiseFunction::kSoftplus:
        return run<T, PointwiseFunction::kSoftplus>(a, parallel);
      case PointwiseFunction::kGelu:
        return run<T, PointwiseFunction::kGelu>(a, parallel);
      case PointwiseFunction::kGeluTanh:
        return run<T, PointwiseFunction::kGeluTanh>(a, parallel);
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
