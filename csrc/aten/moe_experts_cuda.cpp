#include "aten/moe_experts_cuda.h"

#include <ATen/ops/empty.h>

#include "aten/kernel_support.h"
#include "kernels/moe_cuda.h"

namespace quartz {

bool moe_experts_on_gpu(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& up,
                        const at::Tensor& down, const at::Tensor& up_bias, const at::Tensor& down_bias,
                        const MoeGateOptions& gate, const at::Tensor& y) {
  if (!gate.gated || !up.is_contiguous() || !down.is_contiguous()) return false;
  const auto bias = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; };
  const auto first_bias = bias(up_bias), second_bias = bias(down_bias);
  const auto rows = x.stride(1) == 1 && x.stride(0) % 8 == 0 ? x : x.contiguous();
  const auto long_ids = ids.to(at::kLong).contiguous(), float_weights = weights.to(at::kFloat).contiguous();
  kernels::cuda::MoeExperts a{};
  a.x = rows.const_data_ptr();
  a.ids = long_ids.const_data_ptr<int64_t>();
  a.weights = float_weights.const_data_ptr<float>();
  a.up = up.const_data_ptr();
  a.down = down.const_data_ptr();
  a.up_bias = first_bias.defined() ? first_bias.const_data_ptr() : nullptr;
  a.down_bias = second_bias.defined() ? second_bias.const_data_ptr() : nullptr;
  a.y = y.mutable_data_ptr();
  a.tokens = rows.size(0);
  a.hidden = rows.size(1);
  a.width = down.size(gate.transposed ? 1 : 2);
  a.experts = up.size(0);
  a.k = ids.size(1);
  a.x_row = rows.stride(0);
  a.interleaved = gate.interleaved;
  a.transposed = gate.transposed;
  a.activation = gate.activation;
  a.alpha = gate.alpha;
  a.limit = gate.limit;
  a.up_offset = gate.up_offset;
  a.dtype = kernel_dtype(x);
  a.stream = current_gpu_stream(x);
  const int64_t bytes = kernels::cuda::moe_experts_workspace(a);
  if (bytes < 0) return false;
  const auto workspace = at::empty({bytes}, x.options().dtype(at::kByte));
  a.workspace = workspace.mutable_data_ptr();
  kernels::cuda::moe_experts(a);
  return true;
}

}  // namespace quartz
