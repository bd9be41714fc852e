// The experts of a mixture-of-experts layer on CUDA (sm_90a), for bf16 and fp16:
//
//   p = x up[e]^T + up_bias[e]                      float, not rounded
//   h = act(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)      rounded once
//   o = h down[e]^T + down_bias[e]                                          rounded once
//   y = sum over the token's experts of weight * o  fused multiply-adds in float from +0, in ascending order of expert
//   id
//                                                   (same id: of slot), rounded once
//
// Every product is the chain of matmul_cuda.h, so a token's bits are a function of its row, its ids and weights alone.
// Ids below 0 or beyond the last expert are skipped; a token without any expert gets zeros.
#pragma once

#include "kernels/dtype.h"
#include "kernels/moe_experts.h"

namespace quartz::kernels::cuda {

struct MoeExperts {
  const void* x;         // [tokens, hidden], rows x_row apart
  const int64_t* ids;    // [tokens, k]
  const float* weights;  // [tokens, k]
  const void* up;    // [experts, 2 width, hidden]: gates first, or alternating; transposed: [experts, hidden, 2 width]
  const void* down;  // [experts, hidden, width]; transposed: [experts, width, hidden]
  const void *up_bias, *down_bias;  // [experts, 2 width], [experts, hidden] of dtype, or null
  void* y;                          // [tokens, hidden], contiguous
  void* workspace;                  // moe_experts_workspace bytes, aligned to 256
  int64_t tokens, hidden, width, experts, k, x_row;
  bool interleaved, transposed;
  GateActivation activation;
  float alpha = 1, limit = 0, up_offset = 0;  // limit: infinity where there is none
  DType dtype;
  bool frozen_weights = false;  // as in matmul_cuda.h
  void* stream = nullptr;
};

// Bytes, or -1 for what is not served: float32, activations but kSilu, kGeluTanh, kRelu; hidden or width no multiple of
// 8; more than 1024 experts; 2^31 pairs or rows of weights.
int64_t moe_experts_workspace(const MoeExperts& a);
void moe_experts(const MoeExperts& a);

}  // namespace quartz::kernels::cuda
