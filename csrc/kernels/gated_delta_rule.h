// The gated delta rule (linear attention with a state that forgets and corrects itself), for each sequence and head
// over the tokens t, S of (key size, value size):
//
//   S = exp(g[t]) * S;   m = S^T k[t];   e = (v[t] - m) * beta[t];   S = S + k[t] e^T;   o[t] = S^T q[t]
//
// Order of arithmetic, in float with exp of elementary.h: both products with S are chains of fma over the key's
// elements ascending, from +0, and S is changed by one fma an element. Tokens one after another: a sequence in one
// piece, in pieces that hand on S, or token by token has the same bits. Host = CUDA.
#pragma once

#include "kernels/dtype.h"
#include "kernels/elementary.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

// All contiguous float32.
struct GatedDeltaRule {
  const float *q, *k;     // (batch, length, key heads, key size)
  const float* v;         // (batch, length, heads, value size); heads is a multiple of the key heads
  const float *g, *beta;  // (batch, length, heads)
  float* state;           // (batch, heads, key size, value size), changed in place
  float* o;               // (batch, length, heads, value size)
  int64_t batch, length, key_heads, heads, key_size, value_size;
};

QUARTZ_CPU_KERNEL(void, gated_delta_rule, (const GatedDeltaRule& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void gated_delta_rule(const GatedDeltaRule& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
