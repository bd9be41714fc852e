#include "kernels/gated_delta_rule.h"

#include <algorithm>
#include <cmath>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int64_t kColumns = 64;  // of the state that one task walks: 64 x 128 floats stay in the first cache

void columns(const GatedDeltaRule& a, int64_t row, int64_t first, int64_t count) {
  const int64_t n = row / a.heads, head = row % a.heads, key_head = head / (a.heads / a.key_heads);
  float* state = a.state + row * a.key_size * a.value_size + first;
  float error[kColumns], out[kColumns];
  for (int64_t t = 0; t < a.length; ++t) {
    const int64_t token = n * a.length + t;
    const float *q = a.q + (token * a.key_heads + key_head) * a.key_size,
                *k = a.k + (token * a.key_heads + key_head) * a.key_size;
    const float* v = a.v + (token * a.heads + head) * a.value_size + first;
    const float decay = exp_f32(a.g[token * a.heads + head]), beta = a.beta[token * a.heads + head];
    std::fill_n(error, count, 0.0f);
    std::fill_n(out, count, 0.0f);
    for (int64_t i = 0; i < a.key_size; ++i) {
      float* s = state + i * a.value_size;
      for (int64_t j = 0; j < count; ++j) {
        s[j] = s[j] * decay;
        error[j] = std::fma(s[j], k[i], error[j]);
      }
    }
    for (int64_t j = 0; j < count; ++j) error[j] = (v[j] - error[j]) * beta;
    for (int64_t i = 0; i < a.key_size; ++i) {
      float* s = state + i * a.value_size;
      for (int64_t j = 0; j < count; ++j) {
        s[j] = std::fma(k[i], error[j], s[j]);
        out[j] = std::fma(s[j], q[i], out[j]);
      }
    }
    std::copy_n(out, count, a.o + (token * a.heads + head) * a.value_size + first);
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaRule& a, const Parallel& parallel) {
  const int64_t parts = (a.value_size + kColumns - 1) / kColumns;
  parallel.run(a.batch * a.heads * parts, row_grain(a.length * a.key_size * kColumns, 16384),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t first = i % parts * kColumns;
                   columns(a, i / parts, first, std::min(kColumns, a.value_size - first));
                 }
               });
}

}  // namespace quartz::kernels::QUARTZ_ISA
