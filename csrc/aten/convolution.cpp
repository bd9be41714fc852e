// The "overrideable" convolution pair, which PyTorch's composite convolution calls for devices it does not know. The
// convolution operators themselves go to the native device by name (direct.cpp); these two serve the callers in
// between.
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto x = scope.to_native(input), w = scope.to_native(weight);
  const auto b = bias && bias->defined() ? std::optional(scope.to_native(*bias)) : std::nullopt;
  scope.check_operands("aten::convolution_overrideable");
  return scope.to_quartz(at::convolution(x, w, b, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad_output,
                                                                    const at::Tensor& input, const at::Tensor& weight,
                                                                    at::IntArrayRef stride, at::IntArrayRef padding,
                                                                    at::IntArrayRef dilation, bool transposed,
                                                                    at::IntArrayRef output_padding, int64_t groups,
                                                                    std::array<bool, 3> output_mask) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto g = scope.to_native(grad_output), x = scope.to_native(input), w = scope.to_native(weight);
  scope.check_operands("aten::convolution_backward_overrideable");
  const int64_t bias_size = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  const auto bias_sizes = output_mask[2] ? at::OptionalIntArrayRef(at::IntArrayRef(bias_size)) : std::nullopt;
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(g, x, w, bias_sizes, stride, padding, dilation,
                                                                       transposed, output_padding, groups, output_mask);
  return {scope.to_quartz(grad_input), scope.to_quartz(grad_weight), scope.to_quartz(grad_bias)};
}

}  // namespace

void register_convolution(torch::Library& library) {
  own_kernel<&convolution>(library, "convolution_overrideable");
  own_kernel<&convolution_backward>(library, "convolution_backward_overrideable");
}

}  // namespace quartz
