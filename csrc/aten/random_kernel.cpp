#include "aten/random_kernel.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "runtime/generator.h"

namespace quartz {

using kernels::RandomType;

bool has_random_type(const at::Tensor& tensor) {
  return has_kernel_dtype(tensor) || tensor.scalar_type() == at::kDouble;
}

RandomType random_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return RandomType::kFloat32;
    case at::kHalf:
      return RandomType::kFloat16;
    case at::kBFloat16:
      return RandomType::kBFloat16;
    case at::kDouble:
      return RandomType::kFloat64;
    default:
      return RandomType::kBool;
  }
}

void fill_random(const at::Tensor& self, kernels::RandomFill fill) {
  if (self.numel() == 0) return;
  const c10::DeviceGuard guard(self.device());
  fill.type = random_type(self);
  const bool direct = self.is_contiguous() && (has_random_type(self) || self.scalar_type() == at::kBool);
  const auto dtype = fill.type == RandomType::kBool ? at::kBool : self.scalar_type();
  const auto result =
      direct ? self : at::empty(self.sizes(), self.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
  fill.result = result.mutable_data_ptr();
  fill.count = result.numel();
  QUARTZ_RUN_KERNEL(random_fill, result, fill);
  if (!direct) self.copy_(result);
}

void draw_random(const at::Tensor& self, kernels::RandomFill fill, const std::optional<at::Generator>& generator) {
  if (self.numel() == 0) return;
  const auto blocks = kernels::random_blocks(random_type(self), fill.distribution, self.numel());
  fill.source = take_random_blocks(generator_or_default(generator, self.device()), static_cast<uint64_t>(blocks));
  fill_random(self, fill);
}

}  // namespace quartz
