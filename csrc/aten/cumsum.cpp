// aten::cumsum over the last dimension of float32, bfloat16 and float16 tensors; all else runs the native kernel. Order
// of arithmetic in kernels/cumsum.h.
#include "kernels/cumsum.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/cumsum_ops.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

using Dtype = std::optional<at::ScalarType>;

std::optional<at::Tensor> run(const at::Tensor& self, int64_t dim, Dtype dtype) {
  const auto wanted = dtype.value_or(self.scalar_type());
  if (!has_kernel_dtype(self) || self.numel() == 0 || !is_last_dim(self, dim)) return std::nullopt;
  if (wanted != at::kFloat && wanted != at::kBFloat16 && wanted != at::kHalf) return std::nullopt;
  const c10::DeviceGuard guard(self.device());
  const bool narrower = wanted != self.scalar_type() && wanted != at::kFloat;
  const auto x = narrower ? self.to(wanted) : self;
  const auto rows = rows_of(x);
  auto result = empty_like_rows(x, x.sizes(), wanted);
  kernels::CumSum a{};
  a.x = rows.data();
  a.y = result.mutable_data_ptr();
  a.rows = rows.count;
  a.width = rows.width;
  a.x_stride = rows.stride;
  a.dtype = kernel_dtype(x);
  a.y_dtype = kernel_dtype(result);
  QUARTZ_RUN_KERNEL(cumsum, self, a);
  return result;
}

at::Tensor cumsum(const at::Tensor& self, int64_t dim, Dtype dtype) {
  if (auto result = run(self, dim, dtype)) return *result;
  return fallback_of<at::_ops::cumsum>(self, dim, dtype);
}

at::Tensor& cumsum_(at::Tensor& self, int64_t dim, Dtype dtype) {
  if (!dtype || *dtype == self.scalar_type()) {
    if (auto result = run(self, dim, dtype)) return self.copy_(*result);
  }
  fallback_of<at::_ops::cumsum_>(self, dim, dtype);
  return self;
}

at::Tensor& cumsum_out(const at::Tensor& self, int64_t dim, Dtype dtype, at::Tensor& out) {
  if (may_give_apart(self, out) && out.scalar_type() == dtype.value_or(self.scalar_type())) {
    if (auto result = run(self, dim, dtype)) return give(*result, out);
  }
  fallback_of<at::_ops::cumsum_out>(self, dim, dtype, out);
  return out;
}

}  // namespace

QUARTZ_OPERATORS(cumsum) {
  operators.replace<&cumsum>("cumsum");
  operators.replace<&cumsum_>("cumsum_");
  operators.replace<&cumsum_out>("cumsum.out");
}

}  // namespace quartz
