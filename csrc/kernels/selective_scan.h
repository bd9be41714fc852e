// The recurrence of selective state space models (Mamba), for each sequence and channel over the tokens t:
//
//   d = softplus(dt[t] + bias)  (or dt[t] + bias),   h[n] = exp(d * A[n]) * h[n] + (d * B[t, n]) * x[t]
//   y[t] = (sum_n h[n] * C[t, n] + D * x[t]) * silu(z[t])
//
// Order of arithmetic, in float with exp and log of elementary.h: d; then each h[n] = fma(exp(d * A[n]), h[n], (d * B)
// * x); the sum is one chain of fma over n ascending, from +0; then fma(D, x, sum); then * (z / (1 + exp(-z))). Tokens
// one after another: a sequence in one piece, in pieces that hand on h, or token by token has the same bits. Host =
// CUDA.
#pragma once

#include "kernels/dtype.h"
#include "kernels/elementary.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

// All contiguous float32; d, z and dt_bias may be null.
struct SelectiveScan {
  const float *x, *dt, *z;   // (batch, channels, length)
  const float* a;            // (channels, states)
  const float *b, *c;        // (batch, length, states)
  const float *d, *dt_bias;  // (channels)
  float* h;                  // (batch, channels, states): the state, changed in place
  float* y;                  // (batch, channels, length)
  int64_t batch, channels, length, states;
  bool softplus;
};

// log(1 + exp(x)), also where exp(x) is small beside 1.
QUARTZ_HD float softplus_f32(float x) {
  if (x > 20.0f) return x;
  const float e = exp_f32(x), u = 1.0f + e;
  return u == 1.0f ? e : log_f32(u) * (e / (u - 1.0f));
}

// One channel of one sequence.
QUARTZ_HD void selective_scan_channel(const SelectiveScan& a, int64_t row) {
  const int64_t n = row / a.channels, channel = row % a.channels, states = a.states;
  const float *x = a.x + row * a.length, *dt = a.dt + row * a.length, *decay = a.a + channel * states;
  const float bias = a.dt_bias != nullptr ? a.dt_bias[channel] : 0.0f;
  float* h = a.h + row * states;
  for (int64_t t = 0; t < a.length; ++t) {
    const float *b = a.b + (n * a.length + t) * states, *c = a.c + (n * a.length + t) * states;
    float d = dt[t] + bias;
    if (a.softplus) d = softplus_f32(d);
    for (int64_t i = 0; i < states; ++i) h[i] = fmaf(exp_f32(d * decay[i]), h[i], (d * b[i]) * x[t]);
    float sum = 0.0f;
    for (int64_t i = 0; i < states; ++i) sum = fmaf(h[i], c[i], sum);
    if (a.d != nullptr) sum = fmaf(a.d[channel], x[t], sum);
    if (a.z != nullptr) {
      const float z = a.z[row * a.length + t];
      sum = sum * (z / (1.0f + exp_f32(-z)));
    }
    a.y[row * a.length + t] = sum;
  }
}

QUARTZ_CPU_KERNEL(void, selective_scan, (const SelectiveScan& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void selective_scan(const SelectiveScan& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
