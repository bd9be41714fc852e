// quartz::random_fill_; the formulas in kernels/random_fill.h.
#include "kernels/random_fill.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::random_fill_";

void random_fill_(at::Tensor& self, c10::string_view distribution, int64_t seed, int64_t offset, double first,
                  double second) {
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(self), kName, "self", "be float32, float16 or bfloat16", self.scalar_type());
  kernels::RandomFill a{};
  if (distribution == "uniform") {
    a.distribution = kernels::Distribution::kUniform;
    QUARTZ_CHECK_ARGUMENT(first <= second, kName, "low", "not be above high", first, " and ", second);
  } else if (distribution == "normal") {
    a.distribution = kernels::Distribution::kNormal;
    QUARTZ_CHECK_ARGUMENT(second >= 0, kName, "std", "be at least 0", second);
  } else if (distribution == "exponential") {
    a.distribution = kernels::Distribution::kExponential;
    QUARTZ_CHECK_ARGUMENT(first > 0, kName, "rate", "be above 0", first);
  } else {
    TORCH_CHECK(distribution == "bernoulli", kName,
                ": distribution must be uniform, normal, exponential or bernoulli, got ", std::string(distribution));
    a.distribution = kernels::Distribution::kBernoulli;
    QUARTZ_CHECK_ARGUMENT(first >= 0 && first <= 1, kName, "p", "be from 0 to 1", first);
  }
  QUARTZ_CHECK_ARGUMENT(offset >= 0, kName, "offset", "be at least 0", offset);
  if (self.numel() == 0) return;
  const c10::DeviceGuard guard(self.device());
  const auto result =
      self.is_contiguous() ? self : at::empty(self.sizes(), self.options().memory_format(at::MemoryFormat::Contiguous));
  a.result = result.mutable_data_ptr();
  a.count = result.numel();
  a.dtype = kernel_dtype(result);
  a.seed = static_cast<uint64_t>(seed);
  a.offset = static_cast<uint64_t>(offset);
  a.first = first;
  a.second = second;
  QUARTZ_RUN_KERNEL(random_fill, result, a);
  if (!result.is_same(self)) self.copy_(result);
}

}  // namespace

QUARTZ_OPERATORS(random_fill) {
  operators.define(
      "random_fill_(Tensor(a!) self, str distribution, int seed, int offset, float first, float second) -> ()");
  operators.implement<&random_fill_>("random_fill_");
}

}  // namespace quartz
