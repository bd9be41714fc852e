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
// For weights of `experts` experts whose first has `projected` rows.
MoeLayer check_moe_layer(const char* op, const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                         const at::Tensor& up_bias, const at::Tensor& down_bias, int64_t experts, int64_t projected,
                         bool gated);

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
