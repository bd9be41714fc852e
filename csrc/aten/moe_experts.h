// What quartz::moe_experts and quartz::moe_experts_quantized share: the layer's checks and its steps on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "aten/moe_experts_cuda.h"
#include "kernels/matmul.h"

namespace quartz {

// The layer's shape, checked.
struct MoeLayer {
  int64_t tokens, k, experts, hidden, width, projected;  // projected: rows of the first weight
};
// `rows`: the dimension of `up` that has them. What the weights' other dimensions mean is for the caller to check.
MoeLayer check_moe_layer(const char* op, const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                         const at::Tensor& up, const at::Tensor& down, const at::Tensor& up_bias,
                         const at::Tensor& down_bias, int64_t rows, bool gated);
// That the second weight is one of `experts` matrices from `width` to `hidden`, as the layer wants it.
void check_moe_down(const char* op, const MoeLayer& layer, int64_t experts, int64_t width, int64_t hidden,
                    const at::Tensor& up, const at::Tensor& down);

MoeGateOptions moe_gate_options(const char* op, c10::string_view activation, bool gated, bool interleaved,
                                bool transposed, double alpha, std::optional<double> limit, double up_offset);

// The weights of all experts for one of the two products, plain or quantised.
struct ExpertWeights {
  const void* w = nullptr;
  kernels::Matmul::Strides strides = {};
  kernels::QuantizedWeight quantized = {};
  at::Tensor bias;  // [experts, columns of the product], or undefined
};

void moe_experts_on_cpu(const MoeLayer& layer, const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                        const ExpertWeights& up, const ExpertWeights& down, const MoeGateOptions& gate,
                        const at::Tensor& y);

}  // namespace quartz
