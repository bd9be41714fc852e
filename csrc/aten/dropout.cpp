// native_dropout has no generator argument: its CPU kernel would draw from the CPU's default generator instead of ours.
// PyTorch's composite dropout of a CPU tensor takes another way, x * noise with noise = mask / (1 - p) rounded to the
// dtype of x; these two keep that order of arithmetic, so that a model trains to the same bits on "cpu" and "quartz".
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"
#include "runtime/generator.h"

namespace quartz {
namespace {

at::Tensor scaled_noise(const at::Tensor& mask, at::ScalarType dtype, double keep) {
  auto noise = mask.to(dtype);
  return keep == 0. ? noise.zero_() : noise.div_(keep);
}

// Returns (x * noise, mask) with mask ~ Bernoulli(1 - p); in evaluation (x, ones).
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto x = scope.to_native(input);
  if (train && !*train) {
    return {scope.to_quartz(x.clone()), scope.to_quartz(at::ones_like(x, x.options().dtype(at::kBool)))};
  }
  const double keep = 1. - p;
  auto mask = at::empty_like(x, x.options().dtype(at::kBool))
                  .bernoulli_(keep, native_generator(default_generator(input.device().index())));
  return {scope.to_quartz(x.mul(scaled_noise(mask, x.scalar_type(), keep))), scope.to_quartz(mask)};
}

// `scale` is 1 / (1 - p), or 0 for p = 1.
at::Tensor native_dropout_backward(const at::Tensor& grad_output, const at::Tensor& mask, double scale) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto gradient = scope.to_native(grad_output), native_mask = scope.to_native(mask);
  scope.check_operands("aten::native_dropout_backward");
  if (!at::isFloatingType(gradient.scalar_type()) && !at::isComplexType(gradient.scalar_type())) {
    return scope.to_quartz(gradient.mul(native_mask).mul(scale));  // promotes to float
  }
  const double keep = scale == 0. ? 0. : 1. / scale;
  return scope.to_quartz(gradient.mul(scaled_noise(native_mask, gradient.scalar_type(), keep)));
}

}  // namespace

// On cuda the native operator draws from CUDA's default generator, which is ours, and fuses the two passes.
void register_dropout(torch::Library& library) {
  if (substrate().is_cuda()) return;
  own_kernel<&native_dropout>(library, "native_dropout");
  own_kernel<&native_dropout_backward>(library, "native_dropout_backward");
}

}  // namespace quartz
