#include "kernels/gated_delta_rule.h"

#include "kernels/cuda/launch.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kColumns = 32;

// A thread a column of the state, which lies in global memory where shared memory is too small for it.
__global__ void __launch_bounds__(kColumns) delta_rule(const GatedDeltaRule a, bool in_shared) {
  extern __shared__ float memory[];
  const int64_t row = blockIdx.x, n = row / a.heads, head = row % a.heads, key_head = head / (a.heads / a.key_heads);
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns + threadIdx.x;
  if (column >= a.value_size) return;  // nobody waits for another thread
  float* const home = a.state + row * a.key_size * a.value_size + column;
  float* const s = in_shared ? memory + threadIdx.x : home;
  const int64_t step = in_shared ? kColumns : a.value_size;
  if (in_shared) {
    for (int64_t i = 0; i < a.key_size; ++i) s[i * step] = home[i * a.value_size];
  }
  for (int64_t t = 0; t < a.length; ++t) {
    const int64_t token = n * a.length + t;
    const float *q = a.q + (token * a.key_heads + key_head) * a.key_size,
                *k = a.k + (token * a.key_heads + key_head) * a.key_size;
    const float decay = exp_f32(a.g[token * a.heads + head]), beta = a.beta[token * a.heads + head];
    float error = 0.0f, out = 0.0f;
    for (int64_t i = 0; i < a.key_size; ++i) {
      const float kept = __fmul_rn(s[i * step], decay);
      s[i * step] = kept;
      error = fmaf(kept, k[i], error);
    }
    error = __fmul_rn(__fsub_rn(a.v[(token * a.heads + head) * a.value_size + column], error), beta);
    for (int64_t i = 0; i < a.key_size; ++i) {
      const float changed = fmaf(k[i], error, s[i * step]);
      s[i * step] = changed;
      out = fmaf(changed, q[i], out);
    }
    a.o[(token * a.heads + head) * a.value_size + column] = out;
  }
  if (in_shared) {
    for (int64_t i = 0; i < a.key_size; ++i) home[i * a.value_size] = s[i * step];
  }
}

}  // namespace

void gated_delta_rule(const GatedDeltaRule& a, void* stream) {
  if (a.batch * a.heads == 0 || a.value_size == 0) return;
  const int64_t bytes = a.key_size * kColumns * 4;
  const bool in_shared = bytes <= 48 * 1024;
  const dim3 grid(static_cast<unsigned>(a.batch * a.heads),
                  static_cast<unsigned>((a.value_size + kColumns - 1) / kColumns));
  delta_rule<<<grid, kColumns, in_shared ? bytes : 0, static_cast<cudaStream_t>(stream)>>>(a, in_shared);
  check(cudaGetLastError(), "gated delta rule");
}

}  // namespace quartz::kernels::cuda
