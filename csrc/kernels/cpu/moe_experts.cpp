#include "kernels/moe_experts.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

// Elements of work that are worth a task of their own.
constexpr int64_t kGrain = 16384;
int64_t grain_of(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

QUARTZ_INLINE Vec silu(Vec v, Vec alpha) { return div(v, add(broadcast(1.0f), exp(sub(zero(), mul(alpha, v))))); }

// 0.5 v (1 + tanh(u)) = v / (1 + exp(-2 u)), u = sqrt(2 / pi) (v + 0.044715 v^3).
QUARTZ_INLINE Vec gelu_tanh(Vec v) {
  const Vec cube = mul(mul(v, v), v), inner = fma(broadcast(0.044715f), cube, v);
  return div(v, add(broadcast(1.0f), exp(mul(broadcast(-1.5957691216057308f), inner))));
}

QUARTZ_INLINE Vec gelu(Vec v) {  // erf has no vector form here: rare in mixtures of experts
  alignas(64) float values[kLanes];
  store(values, v);
  for (float& value : values) value = 0.5f * value * (1.0f + erff(value * 0.70710678118654752f));
  return load(values);
}

template <GateActivation ACTIVATION>
QUARTZ_INLINE Vec activate(Vec v, Vec alpha) {
  if constexpr (ACTIVATION == GateActivation::kSilu) return silu(v, alpha);
  if constexpr (ACTIVATION == GateActivation::kGelu) return gelu(v);
  if constexpr (ACTIVATION == GateActivation::kGeluTanh) return gelu_tanh(v);
  const Vec positive = max(zero(), v);
  if constexpr (ACTIVATION == GateActivation::kReluSquared) return mul(positive, positive);
  return positive;
}

template <class T, GateActivation ACTIVATION>
void gate_rows(const MoeGate& a, int64_t begin, int64_t end) {
  const Vec alpha = broadcast(a.alpha), limit = broadcast(a.limit), lower = broadcast(-a.limit);
  const Vec offset = broadcast(a.up_offset);
  const int64_t columns = a.gated ? 2 * a.width : a.width;
  for (int64_t row = begin; row < end; ++row) {
    const float* in = a.projected + row * columns;
    T* h = static_cast<T*>(a.h) + row * a.width;
    for (int64_t c = 0; c < a.width; c += kLanes) {
      const int64_t n = std::min<int64_t>(kLanes, a.width - c);
      const Mask mask = first(n);
      if (!a.gated) {
        store(h + c, activate<ACTIVATION>(load(in + c, mask), alpha), mask);
        continue;
      }
      Vec gate, up;
      if (a.interleaved) {
        alignas(64) float gates[kLanes] = {}, ups[kLanes] = {};
        for (int64_t i = 0; i < n; ++i) {
          gates[i] = in[2 * (c + i)];
          ups[i] = in[2 * (c + i) + 1];
        }
        gate = load(gates);
        up = load(ups);
      } else {
        gate = load(in + c, mask);
        up = load(in + a.width + c, mask);
      }
      gate = min(limit, gate);
      up = add(max(lower, min(limit, up)), offset);
      store(h + c, mul(activate<ACTIVATION>(gate, alpha), up), mask);
    }
  }
}

template <class T>
void gate_typed(const MoeGate& a, const Parallel& parallel) {
  parallel.run(a.rows, grain_of(a.width), [&](int64_t begin, int64_t end) {
    switch (a.activation) {
      case GateActivation::kSilu:
        return gate_rows<T, GateActivation::kSilu>(a, begin, end);
      case GateActivation::kGelu:
        return gate_rows<T, GateActivation::kGelu>(a, begin, end);
      case GateActivation::kGeluTanh:
        return gate_rows<T, GateActivation::kGeluTanh>(a, begin, end);
      case GateActivation::kRelu:
        return gate_rows<T, GateActivation::kRelu>(a, begin, end);
      case GateActivation::kReluSquared:
        return gate_rows<T, GateActivation::kReluSquared>(a, begin, end);
    }
  });
}

template <class T>
void combine_rows(const MoeCombine& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    // The token's slots by (expert id, slot): k is small.
    int64_t order[kMaxPairsOfToken];
    int64_t used = 0;
    for (int64_t j = 0; j < a.k; ++j) {
      if (a.row_of[token * a.k + j] < 0) continue;
      int64_t place = used++;
      for (; place > 0 && a.ids[token * a.k + order[place - 1]] > a.ids[token * a.k + j]; --place) {
        order[place] = order[place - 1];
      }
      order[place] = j;
    }
    T* y = static_cast<T*>(a.y) + token * a.width;
    for (int64_t c = 0; c < a.width; c += 16) {
      const int64_t n = a.width - c;
      Vec16 sum = zero16();
      for (int64_t u = 0; u < used; ++u) {
        const int64_t pair = token * a.k + order[u];
        const T* row = static_cast<const T*>(a.rows) + static_cast<int64_t>(a.row_of[pair]) * a.width;
        sum = fma(broadcast16(a.weights[pair]), load16(row + c, n), sum);
      }
      store16(y + c, sum, n);
    }
  }
}

}  // namespace

void moe_gather(const MoeGather& a, const Parallel& parallel) {
  const int64_t bytes = a.width * a.element_size;
  parallel.run(a.count, grain_of(a.width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t token = a.pairs[row] / a.k;
      memcpy(static_cast<char*>(a.rows) + row * bytes,
             static_cast<const char*>(a.x) + token * a.stride * a.element_size, static_cast<std::size_t>(bytes));
    }
  });
}

void moe_gate(const MoeGate& a, const Parallel& parallel) {
  switch (a.dtype) {
    case DType::kFloat32:
      return gate_typed<float>(a, parallel);
    case DType::kFloat16:
      return gate_typed<Float16>(a, parallel);
    case DType::kBFloat16:
      return gate_typed<BFloat16>(a, parallel);
  }
}

void moe_combine(const MoeCombine& a, const Parallel& parallel) {
  parallel.run(a.tokens, grain_of(a.width * a.k), [&](int64_t begin, int64_t end) {
    switch (a.dtype) {
      case DType::kFloat32:
        return combine_rows<float>(a, begin, end);
      case DType::kFloat16:
        return combine_rows<Float16>(a, begin, end);
      case DType::kBFloat16:
        return combine_rows<BFloat16>(a, begin, end);
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
