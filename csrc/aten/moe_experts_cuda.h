// quartz::moe_experts on a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include "aten/quantized_weight.h"
#include "kernels/moe_experts.h"

namespace quartz {

struct MoeGateOptions {
  kernels::GateActivation activation;
  bool gated, interleaved, transposed;
  float alpha, limit, up_offset;
};

// False, with nothing written to y, for what the kernels do not serve. Shapes and dtypes are checked.
bool moe_experts_on_gpu(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& up,
                        const at::Tensor& down, const at::Tensor& up_bias, const at::Tensor& down_bias,
                        const MoeGateOptions& gate, const at::Tensor& y);

// The same with quantised weights.
bool moe_experts_quantized_on_gpu(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                                  const QuantizedArgument& up, const QuantizedArgument& down, const at::Tensor& up_bias,
                                  const at::Tensor& down_bias, const MoeGateOptions& gate, const at::Tensor& y);

}  // namespace quartz
