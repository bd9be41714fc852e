#include "aten/moe_experts_cuda.h"

#include <ATen/ops/empty.h>

#include "aten/kernel_support.h"
#include "kernels/moe_cuda.h"
#include "kernels/quantized_cuda.h"

namespace quartz {
namespace {

// The layer without its weights, and the tensors that it points to.
struct Call {
  at::Tensor rows, ids, weights, up_bias, down_bias;
  kernels::cuda::MoeExperts layer{};
};

// The rows as the kernels read them, 16 bytes at a time.
at::Tensor rows_of(const at::Tensor& x) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && x.stride(0) % 8 == 0;
  return aligned && x.stride(1) == 1 ? x : x.clone(at::MemoryFormat::Contiguous);
}

Call call_of(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& up_bias,
             const at::Tensor& down_bias, const MoeGateOptions& gate, const at::Tensor& y) {
  const auto dense = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; };
  Call call{rows_of(x), ids.to(at::kLong).contiguous(), weights.to(at::kFloat).contiguous(), dense(up_bias),
            dense(down_bias)};
  kernels::cuda::MoeExperts& a = call.layer;
  a.x = call.rows.const_data_ptr();
  a.ids = call.ids.const_data_ptr<int64_t>();
  a.weights = call.weights.const_data_ptr<float>();
  a.up_bias = up_bias.defined() ? call.up_bias.const_data_ptr() : nullptr;
  a.down_bias = down_bias.defined() ? call.down_bias.const_data_ptr() : nullptr;
  a.y = y.mutable_data_ptr();
  a.tokens = x.size(0);
  a.hidden = x.size(1);
  a.k = ids.size(1);
  a.x_row = call.rows.stride(0);
  a.interleaved = gate.interleaved;
  a.transposed = gate.transposed;
  a.activation = gate.activation;
  a.alpha = gate.alpha;
  a.limit = gate.limit;
  a.up_offset = gate.up_offset;
  a.dtype = kernel_dtype(x);
  a.stream = current_gpu_stream(x);
  return call;
}

}  // namespace

bool moe_experts_on_gpu(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& up,
                        const at::Tensor& down, const at::Tensor& up_bias, const at::Tensor& down_bias,
                        const MoeGateOptions& gate, const at::Tensor& y) {
  if (!gate.gated || !up.is_contiguous() || !down.is_contiguous()) return false;
  Call call = call_of(x, ids, weights, up_bias, down_bias, gate, y);
  kernels::cuda::MoeExperts& a = call.layer;
  a.up = up.const_data_ptr();
  a.down = down.const_data_ptr();
  a.width = down.size(gate.transposed ? 1 : 2);
  a.experts = up.size(0);
  const int64_t bytes = kernels::cuda::moe_experts_workspace(a);
  if (bytes < 0) return false;
  const auto workspace = at::empty({bytes}, x.options().dtype(at::kByte));
  a.workspace = workspace.mutable_data_ptr();
  kernels::cuda::moe_experts(a);
  return true;
}

bool moe_experts_quantized_on_gpu(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                                  const QuantizedArgument& up, const QuantizedArgument& down, const at::Tensor& up_bias,
                                  const at::Tensor& down_bias, const MoeGateOptions& gate, const at::Tensor& y) {
  if (!gate.gated) return false;
  Call call = call_of(x, ids, weights, up_bias, down_bias, gate, y);
  kernels::cuda::QuantizedMoe a{call.layer, up.w, down.w};
  a.layer.width = down.k;
  a.layer.experts = up.batch;
  const int64_t bytes = kernels::cuda::quantized_moe_workspace(a);
  if (bytes < 0) return false;
  const auto workspace = at::empty({bytes}, x.options().dtype(at::kByte));
  a.layer.workspace = workspace.mutable_data_ptr();
  kernels::cuda::quantized_moe(a);
  return true;
}

}  // namespace quartz
