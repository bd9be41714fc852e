// aten::native_dropout, which F.dropout of a quartz tensor becomes: the mask comes from the default generator's counter
// (kernels/dropout.h). Its backward is the native device's, grad * mask * scale.
#include "kernels/dropout.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/DeviceGuard.h>

#include "aten/alias.h"
#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/random_kernel.h"
#include "runtime/generator.h"

namespace quartz {
namespace {

// Returns (x * mask / (1 - p), mask) with mask ~ Bernoulli(1 - p); in evaluation (x, ones).
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  const auto mask_options = input.options().dtype(at::kBool);
  if (train && !*train) return {input.clone(), at::ones_like(input, mask_options)};
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  const double keep = 1. - p, scale = keep == 0. ? 0. : 1. / keep;
  auto mask = at::empty_like(input, mask_options);
  if (!has_kernel_dtype(input) || input.numel() == 0) {
    kernels::RandomFill fill{};
    fill.distribution = kernels::Distribution::kBernoulli;
    fill.first = keep;
    draw_random(mask, fill, std::nullopt);
    return {at::mul(at::mul(input, mask), scale), mask};
  }
  const c10::DeviceGuard guard(input.device());
  const auto x = input.contiguous();
  auto result = at::empty_like(input);
  // Elements are numbered in row-major order, whatever the strides.
  const auto dense_mask = mask.is_contiguous() ? mask : at::empty_like(mask, at::MemoryFormat::Contiguous);
  const auto dense_result = result.is_contiguous() ? result : at::empty_like(result, at::MemoryFormat::Contiguous);
  kernels::Dropout a{};
  a.x = x.const_data_ptr();
  a.result = dense_result.mutable_data_ptr();
  a.mask = static_cast<uint8_t*>(dense_mask.mutable_data_ptr());
  a.count = x.numel();
  a.dtype = kernel_dtype(x);
  a.keep = keep;
  a.scale = static_cast<float>(scale);
  const auto blocks = kernels::random_blocks(kernels::RandomType::kBool, kernels::Distribution::kBernoulli, a.count);
  a.source = take_random_blocks(default_generator(input.device().index()), static_cast<uint64_t>(blocks));
  QUARTZ_RUN_KERNEL(dropout, x, a);
  if (!dense_mask.is_same(mask)) mask.copy_(dense_mask);
  if (!dense_result.is_same(result)) result.copy_(dense_result);
  return {result, mask};
}

}  // namespace

QUARTZ_OPERATORS(dropout) { operators.replace<&native_dropout>("native_dropout"); }

}  // namespace quartz
