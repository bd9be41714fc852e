// Products with quantised weights on CUDA (sm_90a); what a weight is: quantized_weight.h, the sums: matmul_cuda.h.
//
//   out[m, n] = activation(sum_k x[m, k] W[n, k] * outer[n] * x_scales[m] + bias[n])
//
// in float from left to right, one rounding. W is decoded in shared memory, inside the product.
#pragma once

#include "kernels/matmul_cuda.h"
#include "kernels/moe_cuda.h"
#include "kernels/quantized_weight.h"

namespace quartz::kernels::cuda {

struct QuantizedMatmul {
  Matmul product;  // one matrix, 16-bit types, alpha and beta 1; its w is not read
  QuantizedWeight w;
  const float* x_scales = nullptr;  // [m], or null
};

// False, with nothing launched, for what only a decoded copy serves: k no multiple of 64, addresses or strides the
// copies cannot read (16 bytes), blocks of scales that are not powers of two of at least 16.
bool quantized_matmul(const QuantizedMatmul& a);

// The last steps alone: out of the sums over k, [m, n], contiguous.
void finish_quantized(const QuantizedMatmul& a, const float* sums);

// W as [batch, n, k] of `dtype`, contiguous.
void decode_weight(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, DType dtype, void* out, void* stream);

struct QuantizedMoe {
  MoeExperts layer;  // its up and down are not read; never transposed, gates first or alternating
  QuantizedWeight up, down;
};

// As moe_experts_workspace and moe_experts.
int64_t quantized_moe_workspace(const QuantizedMoe& a);
void quantized_moe(const QuantizedMoe& a);

}  // namespace quartz::kernels::cuda
