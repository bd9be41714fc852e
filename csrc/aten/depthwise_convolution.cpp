// aten::convolution where it is depthwise and over one dimension, in float32, bfloat16 and float16: what models with
// a state run over a sequence. All else runs the native kernel. Order of arithmetic in kernels/depthwise_convolution.h.
#include "kernels/depthwise_convolution.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/convolution_ops.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

bool serves(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, at::IntArrayRef stride,
            at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, int64_t groups) {
  if (transposed || x.dim() != 3 || weight.dim() != 3 || !has_kernel_dtype(x) || x.numel() == 0) return false;
  if (stride.size() != 1 || padding.size() != 1 || dilation.size() != 1) return false;
  const int64_t channels = x.size(1), reach = (weight.size(2) - 1) * dilation[0] + 1;
  if (groups != channels || weight.size(1) != 1 || weight.size(0) % channels != 0 || weight.numel() == 0) return false;
  if (stride[0] < 1 || dilation[0] < 1 || padding[0] < 0 || x.size(2) + 2 * padding[0] < reach) return false;
  for (const auto* tensor : {&weight, &bias}) {
    if (tensor->defined() && (tensor->scalar_type() != x.scalar_type() || tensor->device() != x.device() ||
                              tensor->layout() != at::kStrided)) {
      return false;
    }
  }
  return x.layout() == at::kStrided && (!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)));
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation,
                       bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  const auto added = bias.value_or(at::Tensor());
  const auto s = C10_AS_INTARRAYREF_SLOW(stride), p = C10_AS_INTARRAYREF_SLOW(padding),
             d = C10_AS_INTARRAYREF_SLOW(dilation);
  if (!serves(input, weight, added, s, p, d, transposed, groups.expect_int())) {
    return fallback_of<at::_ops::convolution>(input, weight, bias, stride, padding, dilation, transposed,
                                              output_padding, groups);
  }
  const c10::DeviceGuard guard(input.device());
  const auto x = with_dense_rows(input), w = weight.contiguous();
  const auto b = added.defined() ? added.contiguous() : added;
  kernels::DepthwiseConvolution a{};
  a.batch = x.size(0);
  a.channels = x.size(1);
  a.multiplier = w.size(0) / a.channels;
  a.length = x.size(2);
  a.taps = w.size(2);
  a.stride = s[0];
  a.dilation = d[0];
  a.padding = p[0];
  a.outputs = (a.length + 2 * a.padding - (a.taps - 1) * a.dilation - 1) / a.stride + 1;
  auto result = empty_like_rows(x, {a.batch, w.size(0), a.outputs}, x.scalar_type());
  a.x = x.const_data_ptr();
  a.w = w.const_data_ptr();
  a.bias = b.defined() ? b.const_data_ptr() : nullptr;
  a.y = result.mutable_data_ptr();
  a.x_batch_stride = x.stride(0);
  a.x_channel_stride = x.stride(1);
  a.dtype = kernel_dtype(x);
  QUARTZ_RUN_KERNEL(depthwise_convolution, x, a);
  return result;
}

}  // namespace

QUARTZ_OPERATORS(depthwise_convolution) { operators.replace<&convolution>("convolution"); }

}  // namespace quartz
