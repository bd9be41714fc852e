// quartz::rms_norm and quartz::add_rms_norm; formula and order of arithmetic in kernels/rms_norm.h.
#include "kernels/rms_norm.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/rows.h"

namespace quartz {
namespace {

void run(const char* op, const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, double eps,
         double weight_offset, bool round_first, at::Tensor& y, at::Tensor& sum) {
  QUARTZ_CHECK_ARGUMENT(x.dim() >= 1, op, "x", "have at least one dimension", "a scalar");
  const int64_t width = x.size(-1);
  check_same_device(op, {{"x", x}, {"residual", residual}, {"weight", weight}});
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(x), op, "x", "be float32, float16 or bfloat16", x.scalar_type());
  if (weight.defined()) {
    QUARTZ_CHECK_ARGUMENT(weight.dim() == 1 && weight.size(0) == width, op, "weight",
                          "have one element for each of the last dimension of x", weight.sizes(), " and ", width);
    QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(weight), op, "weight", "be float32, float16 or bfloat16",
                          weight.scalar_type());
  }
  if (residual.defined()) {
    QUARTZ_CHECK_ARGUMENT(residual.sizes() == x.sizes(), op, "residual", "have the shape of x", residual.sizes());
    QUARTZ_CHECK_ARGUMENT(residual.scalar_type() == x.scalar_type(), op, "residual", "have the dtype of x",
                          residual.scalar_type());
  }
  const c10::DeviceGuard guard(x.device());
  y = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  if (residual.defined()) sum = at::empty(x.sizes(), x.options().memory_format(at::MemoryFormat::Contiguous));
  if (x.numel() == 0) return;

  const Rows rows = rows_of(x), residual_rows = residual.defined() ? rows_of(residual) : Rows{};
  const auto contiguous_weight = weight.defined() ? weight.contiguous() : at::Tensor();
  kernels::RmsNorm arguments{};
  arguments.x = rows.data();
  arguments.x_stride = rows.stride;
  if (residual.defined()) {
    arguments.residual = residual_rows.data();
    arguments.residual_stride = residual_rows.stride;
    arguments.sum = sum.mutable_data_ptr();
  }
  if (weight.defined()) arguments.weight = contiguous_weight.const_data_ptr();
  arguments.y = y.mutable_data_ptr();
  arguments.rows = rows.count;
  arguments.width = width;
  arguments.eps = static_cast<float>(eps);
  arguments.weight_offset = static_cast<float>(weight_offset);
  arguments.round_first = round_first;
  arguments.dtype = kernel_dtype(x);
  arguments.weight_dtype = weight.defined() ? kernel_dtype(weight) : arguments.dtype;
  QUARTZ_RUN_KERNEL(rms_norm, x, arguments);
}

at::Tensor rms_norm(const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps, double weight_offset,
                    bool round_first) {
  at::Tensor y, sum;
  run("quartz::rms_norm", x, {}, weight.value_or(at::Tensor()), eps, weight_offset, round_first, y, sum);
  return y;
}

std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& residual,
                                                const std::optional<at::Tensor>& weight, double eps,
                                                double weight_offset, bool round_first) {
  at::Tensor y, sum;
  run("quartz::add_rms_norm", x, residual, weight.value_or(at::Tensor()), eps, weight_offset, round_first, y, sum);
  return {y, sum};
}

}  // namespace

QUARTZ_OPERATORS(rms_norm) {
  operators.define(
      "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0., bool round_first=False) -> Tensor");
  operators.implement<&rms_norm>("rms_norm");
  operators.define(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float weight_offset=0., "
      "bool round_first=False) -> (Tensor, Tensor)");
  operators.implement<&add_rms_norm>("add_rms_norm");
}

}  // namespace quartz
