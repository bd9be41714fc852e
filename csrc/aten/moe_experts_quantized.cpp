// quartz::moe_experts_quantized: quartz::moe_experts on weights of float8, NVFP4 or MXFP4 codes.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/moe_experts.h"
#include "aten/operators.h"
#include "aten/quantized_weight.h"

namespace quartz {
namespace {

constexpr const char* kOp = "quartz::moe_experts_quantized";

at::Tensor moe_experts_quantized(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                                 const at::Tensor& up, const at::Tensor& up_scales, const at::Tensor& down,
                                 const at::Tensor& down_scales, const std::optional<at::Tensor>& up_global_scale,
                                 const std::optional<at::Tensor>& down_global_scale,
                                 const std::optional<at::Tensor>& up_bias, const std::optional<at::Tensor>& down_bias,
                                 c10::string_view format, int64_t block, c10::string_view activation, bool gated,
                                 bool interleaved, double alpha, std::optional<double> limit, double up_offset) {
  const auto first_bias = up_bias.value_or(at::Tensor()), second_bias = down_bias.value_or(at::Tensor());
  const MoeLayer layer = check_moe_layer(kOp, x, ids, weights, up, down, first_bias, second_bias, 1, gated);
  const auto first = quantized_argument(kOp, "up", format, up, up_scales, up_global_scale, layer.hidden, block, 3);
  const auto second =
      quantized_argument(kOp, "down", format, down, down_scales, down_global_scale, layer.width, block, 3);
  check_moe_down(kOp, layer, second.batch, second.k, second.n, up, down);
  const auto gate = moe_gate_options(kOp, activation, gated, interleaved, false, alpha, limit, up_offset);
  const c10::DeviceGuard guard(x.device());
  auto y = at::empty({layer.tokens, layer.hidden}, x.options());
  if (y.numel() == 0) return y;
#if QUARTZ_WITH_CUDA
  if (on_gpu(x)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        moe_experts_quantized_on_gpu(x, ids, weights, first, second, first_bias, second_bias, gate, y), kOp,
        ": on a GPU, float16 or bfloat16, gated by silu, gelu_tanh or relu, sizes that are multiples of 64, at most "
        "1024 experts and blocks of scales that are powers of two of at least 16 are served");
    return y;
  }
#endif
  const ExpertWeights up_weights{nullptr, {0, first.k, 1}, first.w, first_bias},
      down_weights{nullptr, {0, second.k, 1}, second.w, second_bias};
  moe_experts_on_cpu(layer, x, ids, weights, up_weights, down_weights, gate, y);
  return y;
}

}  // namespace

QUARTZ_OPERATORS(moe_experts_quantized) {
  operators.define(
      "moe_experts_quantized(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor up_scales, Tensor down, "
      "Tensor down_scales, Tensor? up_global_scale=None, Tensor? down_global_scale=None, Tensor? up_bias=None, "
      "Tensor? down_bias=None, str format='fp8', int block=128, str activation='silu', bool gated=True, "
      "bool interleaved=False, float alpha=1., float? limit=None, float up_offset=0.) -> Tensor");
  operators.implement<&moe_experts_quantized>("moe_experts_quantized");
}

}  // namespace quartz
