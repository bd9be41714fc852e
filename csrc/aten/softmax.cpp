// aten::_softmax and aten::_log_softmax over the last dimension, or another one of up to 1024 elements, of float32,
// bfloat16 and float16 tensors; all else runs the native kernel. Formulas and order of arithmetic in kernels/softmax.h.
#include "kernels/softmax.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/_log_softmax_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

// half_to_float (float16 in, float32 out) exists on CUDA only.
bool serves(const at::Tensor& self, int64_t dim, bool half_to_float) {
  return has_kernel_dtype(self) && self.numel() > 0 && is_last_dim(self, dim) &&
         (!half_to_float || (on_gpu(self) && self.scalar_type() == at::kHalf));
}

at::Tensor run(const at::Tensor& self, bool half_to_float, bool log) {
  const c10::DeviceGuard guard(self.device());
  const auto rows = rows_of(self);
  auto result = empty_like_rows(self, self.sizes(), half_to_float ? at::kFloat : self.scalar_type());
  kernels::Softmax a{};
  a.x = rows.data();
  a.y = result.mutable_data_ptr();
  a.rows = rows.count;
  a.width = rows.width;
  a.x_stride = rows.stride;
  a.log = log;
  a.dtype = kernel_dtype(self);
  a.y_dtype = kernel_dtype(result);
  QUARTZ_RUN_KERNEL(softmax, self, a);
  return result;
}

// The same over a short dimension that is not the last: rows of a copy.
std::optional<at::Tensor> run_short(const at::Tensor& self, int64_t dim, bool half_to_float, bool log) {
  const auto other = short_dim(self, at::OptionalIntArrayRef(dim));
  if (!other) return std::nullopt;
  const auto rows = self.movedim(*other, -1);
  if (!serves(rows, -1, half_to_float)) return std::nullopt;
  return run(rows, half_to_float, log).movedim(-1, *other).contiguous();
}

at::Tensor softmax(const at::Tensor& self, int64_t dim, bool half_to_float) {
  if (serves(self, dim, half_to_float)) return run(self, half_to_float, false);
  if (auto result = run_short(self, dim, half_to_float, false)) return *result;
  return fallback_of<at::_ops::_softmax>(self, dim, half_to_float);
}
at::Tensor log_softmax(const at::Tensor& self, int64_t dim, bool half_to_float) {
  if (serves(self, dim, half_to_float)) return run(self, half_to_float, true);
  if (auto result = run_short(self, dim, half_to_float, true)) return *result;
  return fallback_of<at::_ops::_log_softmax>(self, dim, half_to_float);
}

bool fits(const at::Tensor& self, bool half_to_float, const at::Tensor& out) {
  return may_give(self, out) && out.scalar_type() == (half_to_float ? at::kFloat : self.scalar_type());
}
at::Tensor& softmax_out(const at::Tensor& self, int64_t dim, bool half_to_float, at::Tensor& out) {
  if (serves(self, dim, half_to_float) && fits(self, half_to_float, out)) {
    return give(run(self, half_to_float, false), out);
  }
  fallback_of<at::_ops::_softmax_out>(self, dim, half_to_float, out);
  return out;
}
at::Tensor& log_softmax_out(const at::Tensor& self, int64_t dim, bool half_to_float, at::Tensor& out) {
  if (serves(self, dim, half_to_float) && fits(self, half_to_float, out)) {
    return give(run(self, half_to_float, true), out);
  }
  fallback_of<at::_ops::_log_softmax_out>(self, dim, half_to_float, out);
  return out;
}

}  // namespace

QUARTZ_OPERATORS(softmax) {
  operators.replace<&softmax>("_softmax");
  operators.replace<&softmax_out>("_softmax.out");
  operators.replace<&log_softmax>("_log_softmax");
  operators.replace<&log_softmax_out>("_log_softmax.out");
}

}  // namespace quartz
