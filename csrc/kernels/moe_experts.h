// The steps of a mixture-of-experts layer around its two grouped products (matmul.h with ragged rows):
//
//   order    the (token, slot) pairs sorted by expert, inside one expert by pair: row r of the grouped products is pair
//            pairs[r]; ends[e] rows belong to the experts 0 to e; pairs of no expert (an id below 0 or beyond the last)
//            are left out
//   gather   row r = x[pairs[r] / k]
//   gate     h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset) in float, one rounding;
//            without a gate h = act(up)
//   combine  y[t] = sum over t's pairs, in ascending order of expert id (equal ids: of slot), of weight * row by fused
//            multiply-add in float from +0, one rounding. A token without any expert gets zeros.
//
// silu(v) = v / (1 + exp(-alpha v)) with alpha 1 for SwiGLU, 1.702 for gpt-oss.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

enum class GateActivation : uint8_t { kSilu, kGelu, kGeluTanh, kRelu, kReluSquared };

struct MoeOrder {
  const int64_t* ids;  // [tokens * k]
  int64_t count, experts;
  int32_t* pairs;   // [count]: what is beyond the last row is not written
  int32_t* row_of;  // [count]: the row of a pair, -1 for a pair of no expert
  int32_t* ends;    // [experts]
};

struct MoeGather {
  const void* x;  // [tokens, width], `stride` elements apart
  const int32_t* pairs;
  void* rows;  // [count, width]
  int64_t count, k, width, stride, element_size;
};

struct MoeGate {
  const float* projected;  // [rows, 2 * width] with a gate, else [rows, width]; rows * columns below 2^63
  void* h;                 // [rows, width] of `dtype`
  int64_t rows, width;
  bool gated, interleaved;  // interleaved: gate and up alternate; else all gates, then all ups
  GateActivation activation;
  float alpha, limit, up_offset;
  DType dtype;
};

struct MoeCombine {
  const void* rows;       // [count, width] of `dtype`
  const int64_t* ids;     // [tokens, k]
  const int32_t* row_of;  // [tokens, k]
  const float* weights;   // [tokens, k]
  void* y;                // [tokens, width] of `dtype`
  int64_t tokens, k, width;
  DType dtype;
};

constexpr int64_t kMaxPairsOfToken = 64;

void moe_order(const MoeOrder& a);  // CPU; integers only

QUARTZ_CPU_KERNEL(void, moe_gather, (const MoeGather& a, const Parallel& parallel), (a, parallel))
QUARTZ_CPU_KERNEL(void, moe_gate, (const MoeGate& a, const Parallel& parallel), (a, parallel))
QUARTZ_CPU_KERNEL(void, moe_combine, (const MoeCombine& a, const Parallel& parallel), (a, parallel))

}  // namespace quartz::kernels
