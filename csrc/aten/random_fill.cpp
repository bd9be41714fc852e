// quartz::random_fill_; the formulas in kernels/random_fill.h.
#include "kernels/random_fill.h"

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/random_kernel.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::random_fill_";

void random_fill_(at::Tensor& self, c10::string_view distribution, int64_t seed, int64_t offset, double first,
                  double second) {
  QUARTZ_CHECK_ARGUMENT(has_random_type(self), kName, "self", "be float32, float16, bfloat16 or float64",
                        self.scalar_type());
  kernels::RandomFill fill{};
  if (distribution == "uniform") {
    fill.distribution = kernels::Distribution::kUniform;
    QUARTZ_CHECK_ARGUMENT(first <= second, kName, "low", "not be above high", first, " and ", second);
  } else if (distribution == "normal") {
    fill.distribution = kernels::Distribution::kNormal;
    QUARTZ_CHECK_ARGUMENT(second >= 0, kName, "std", "be at least 0", second);
  } else if (distribution == "exponential") {
    fill.distribution = kernels::Distribution::kExponential;
    QUARTZ_CHECK_ARGUMENT(first > 0, kName, "rate", "be above 0", first);
  } else {
    TORCH_CHECK(distribution == "bernoulli", kName,
                ": distribution must be uniform, normal, exponential or bernoulli, got ", std::string(distribution));
    fill.distribution = kernels::Distribution::kBernoulli;
    QUARTZ_CHECK_ARGUMENT(first >= 0 && first <= 1, kName, "p", "be from 0 to 1", first);
  }
  QUARTZ_CHECK_ARGUMENT(offset >= 0, kName, "offset", "be at least 0", offset);
  fill.source.seed = static_cast<uint64_t>(seed);
  fill.source.offset = static_cast<uint64_t>(offset);
  fill.first = first;
  fill.second = second;
  fill_random(self, fill);
}

}  // namespace

QUARTZ_OPERATORS(random_fill) {
  operators.define(
      "random_fill_(Tensor(a!) self, str distribution, int seed, int offset, float first, float second) -> ()");
  operators.implement<&random_fill_>("random_fill_");
}

}  // namespace quartz
