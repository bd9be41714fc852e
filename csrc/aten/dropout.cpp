// native_dropout has no generator argument: its CPU kernel would draw from the CPU's default generator instead of ours.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"
#include "runtime/generator.h"

namespace quartz {
namespace {

// Returns (x * mask / (1 - p), mask) with mask ~ Bernoulli(1 - p); in evaluation (x, ones).
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
  auto output = x.mul(mask).mul_(keep == 0. ? 0. : 1. / keep);
  return {scope.to_quartz(output), scope.to_quartz(mask)};
}

}  // namespace

// On cuda the native operator draws from CUDA's default generator, which is ours, and fuses the two passes.
void register_dropout(torch::Library& library) {
  if (!substrate().is_cuda()) own_kernel<&native_dropout>(library, "native_dropout");
}

}  // namespace quartz
