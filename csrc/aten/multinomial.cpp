// aten::multinomial from the counter of the generator; the draws are defined in kernels/multinomial.h.
#include "kernels/multinomial.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/multinomial_ops.h>
#include <ATen/ops/topk.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "aten/alias.h"
#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/random_kernel.h"
#include "runtime/generator.h"

namespace quartz {
namespace {

using Generator = std::optional<at::Generator>;

// Where it is not, the native operator says what is wrong.
bool is_valid(const at::Tensor& self, int64_t samples, bool replacement) {
  return has_random_type(self) && (self.dim() == 1 || self.dim() == 2) && samples > 0 &&
         (replacement || samples <= self.size(-1)) && self.size(-1) <= kernels::kMaxCategories;
}

void check(int32_t flags, int64_t samples) {
  TORCH_CHECK((flags & kernels::kBadProbability) == 0,
              "aten::multinomial: self must hold finite probabilities of at least 0, got one that is NaN, infinite or ",
              "below 0");
  TORCH_CHECK((flags & kernels::kNoProbability) == 0,
              "aten::multinomial: every row of self must have a sum above 0, got a row without a probability above 0");
  TORCH_CHECK((flags & kernels::kTooFewCategories) == 0,
              "aten::multinomial: num_samples must be at most the number of categories of each row with a probability ",
              "above 0 when drawing without replacement, got ", samples);
}

at::Tensor draw(const at::Tensor& self, int64_t samples, bool replacement, const Generator& generator) {
  const c10::DeviceGuard guard(self.device());
  c10::SmallVector<int64_t, 2> sizes(self.sizes().begin(), self.sizes().end());
  sizes.back() = samples;
  auto result = at::empty(sizes, self.options().dtype(at::kLong));
  if (result.numel() == 0) return result;
  if (self.size(-1) == 0) check(kernels::kNoProbability, samples);
  const auto probabilities = self.contiguous();
  kernels::Multinomial a{};
  a.probabilities = probabilities.const_data_ptr();
  a.type = random_type(self);
  a.rows = self.dim() == 2 ? self.size(0) : 1;
  a.categories = self.size(-1);
  a.samples = samples;
  a.replacement = replacement;
  a.result = result.mutable_data_ptr<int64_t>();
  const auto flags = at::zeros({1}, self.options().dtype(at::kInt));
  a.flags = flags.mutable_data_ptr<int32_t>();
  a.source = take_random_blocks(
      generator_or_default(generator, self.device()),
      static_cast<uint64_t>(kernels::multinomial_blocks(a.rows, a.categories, samples, replacement)));
#if QUARTZ_WITH_CUDA
  if (on_gpu(self)) {
    QUARTZ_CHECK_ARGUMENT(a.rows < (int64_t{1} << 31), "aten::multinomial", "self", "have less than 2^31 rows", a.rows);
    const int64_t bytes = kernels::cuda::multinomial_workspace(a);
    const auto workspace = at::empty({bytes}, self.options().dtype(at::kByte));
    a.workspace = workspace.mutable_data_ptr();
    kernels::cuda::multinomial(a, current_gpu_stream(self));
    if (!replacement && samples > 1) {
      const auto scores = workspace.view(at::kFloat).view({a.rows, a.categories});
      result = std::get<1>(at::topk(scores, samples)).view(sizes);
    }
    // A captured graph cannot wait for the device.
    if (a.source.graph_seed == nullptr) check(flags.item<int32_t>(), samples);
    return result;
  }
#endif
  kernels::cpu::multinomial(a, at_parallel());
  check(*a.flags, samples);
  return result;
}

at::Tensor multinomial(const at::Tensor& self, int64_t samples, bool replacement, Generator generator) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!is_valid(self, samples, replacement)) {
    return fallback_of<at::_ops::multinomial>(self, samples, replacement, generator);
  }
  return draw(self, samples, replacement, generator);
}
at::Tensor& multinomial_out(const at::Tensor& self, int64_t samples, bool replacement, Generator generator,
                            at::Tensor& out) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (!is_valid(self, samples, replacement) || out.scalar_type() != at::kLong || out.device() != self.device()) {
    fallback_of<at::_ops::multinomial_out>(self, samples, replacement, generator, out);
    return out;
  }
  const auto result = draw(self, samples, replacement, generator);
  out.resize_(result.sizes());
  out.copy_(result);
  return out;
}

}  // namespace

QUARTZ_OPERATORS(multinomial) {
  operators.replace<&multinomial>("multinomial");
  operators.replace<&multinomial_out>("multinomial.out");
}

}  // namespace quartz
