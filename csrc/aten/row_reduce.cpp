// sum, mean, var, std, logsumexp, argmax and argmin over the last dimension of float32, bfloat16 and float16 tensors,
// sum and mean over up to 1024 elements of another one too (as rows of a copy); all else runs the native kernel.
// Formulas and order of arithmetic in kernels/row_reduce.h.
#include "kernels/row_reduce.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/argmax_ops.h>
#include <ATen/ops/argmin_ops.h>
#include <ATen/ops/logsumexp_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/std_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/var_ops.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

using kernels::Reduction;
using Dtype = std::optional<at::ScalarType>;

bool is_kernel_type(at::ScalarType type) { return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf; }

// Whether the kernel serves a reduction of `self`; without elements there is nothing to add, only rules to follow.
bool serves(const at::Tensor& self) { return has_kernel_dtype(self) && self.numel() > 0; }

at::Tensor reduce(const at::Tensor& self, Reduction reduction, bool keepdim, at::ScalarType dtype,
                  double correction = 0.) {
  const c10::DeviceGuard guard(self.device());
  const auto rows = rows_of(self);
  auto result = empty_like_rows(self, reduced_sizes(self, keepdim), dtype);
  kernels::RowReduce a{};
  a.x = rows.data();
  a.y = result.mutable_data_ptr();
  a.rows = rows.count;
  a.width = rows.width;
  a.x_stride = rows.stride;
  a.correction = correction;
  a.reduction = reduction;
  a.dtype = kernel_dtype(self);
  a.y_dtype = dtype == at::kLong ? kernels::DType::kFloat32 : kernel_dtype(result);
  QUARTZ_RUN_KERNEL(row_reduce, self, a);
  return result;
}

// sum and mean: the elements are converted to the dtype of the result first, which is visible only where it is
// narrower.
std::optional<at::Tensor> summed(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, Dtype dtype,
                                 Reduction reduction) {
  const auto wanted = dtype.value_or(self.scalar_type());
  if (!serves(self) || !is_kernel_type(wanted)) return std::nullopt;
  const bool narrower = wanted != self.scalar_type() && wanted != at::kFloat;
  if (is_last_dim(self, dim)) return reduce(narrower ? self.to(wanted) : self, reduction, keepdim, wanted);
  const auto other = short_dim(self, dim);
  if (!other) return std::nullopt;
  const auto rows = self.movedim(*other, -1);
  auto result = reduce(narrower ? rows.to(wanted) : rows, reduction, false, wanted);
  return keepdim ? result.unsqueeze(*other) : result;
}

at::Tensor sum(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, Dtype dtype) {
  if (auto result = summed(self, dim, keepdim, dtype, Reduction::kSum)) return *result;
  return fallback_of<at::_ops::sum_dim_IntList>(self, dim, keepdim, dtype);
}
at::Tensor mean(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, Dtype dtype) {
  if (auto result = summed(self, dim, keepdim, dtype, Reduction::kMean)) return *result;
  return fallback_of<at::_ops::mean_dim>(self, dim, keepdim, dtype);
}
// The dtype of out= decides; another one that is asked for too is an error of PyTorch's.
Dtype dtype_of(const at::Tensor& out, Dtype asked) {
  return asked && *asked != out.scalar_type() ? Dtype(at::kDouble) : Dtype(out.scalar_type());
}
at::Tensor& sum_out(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, Dtype dtype, at::Tensor& out) {
  if (may_give(self, out)) {
    if (auto result = summed(self, dim, keepdim, dtype_of(out, dtype), Reduction::kSum)) return give(*result, out);
  }
  fallback_of<at::_ops::sum_IntList_out>(self, dim, keepdim, dtype, out);
  return out;
}
at::Tensor& mean_out(const at::Tensor& self, at::OptionalIntArrayRef dim, bool keepdim, Dtype dtype, at::Tensor& out) {
  if (may_give(self, out)) {
    if (auto result = summed(self, dim, keepdim, dtype_of(out, dtype), Reduction::kMean)) return give(*result, out);
  }
  fallback_of<at::_ops::mean_out>(self, dim, keepdim, dtype, out);
  return out;
}

using Correction = std::optional<at::Scalar>;
std::optional<at::Tensor> spread(const at::Tensor& self, at::OptionalIntArrayRef dim, const Correction& correction,
                                 bool keepdim, Reduction reduction) {
  if (!serves(self) || !is_last_dim(self, dim)) return std::nullopt;
  const double subtracted = correction ? correction->toDouble() : 1.;
  if (subtracted >= static_cast<double>(self.size(-1))) return std::nullopt;  // PyTorch warns
  return reduce(self, reduction, keepdim, self.scalar_type(), subtracted);
}
at::Tensor var(const at::Tensor& self, at::OptionalIntArrayRef dim, const Correction& correction, bool keepdim) {
  if (auto result = spread(self, dim, correction, keepdim, Reduction::kVar)) return *result;
  return fallback_of<at::_ops::var_correction>(self, dim, correction, keepdim);
}
at::Tensor& var_out(const at::Tensor& self, at::OptionalIntArrayRef dim, const Correction& correction, bool keepdim,
                    at::Tensor& out) {
  if (may_give(self, out) && out.scalar_type() == self.scalar_type()) {
    if (auto result = spread(self, dim, correction, keepdim, Reduction::kVar)) return give(*result, out);
  }
  fallback_of<at::_ops::var_correction_out>(self, dim, correction, keepdim, out);
  return out;
}
at::Tensor standard_deviation(const at::Tensor& self, at::OptionalIntArrayRef dim, const Correction& correction,
                              bool keepdim) {
  if (auto result = spread(self, dim, correction, keepdim, Reduction::kStd)) return *result;
  return fallback_of<at::_ops::std_correction>(self, dim, correction, keepdim);
}
at::Tensor& standard_deviation_out(const at::Tensor& self, at::OptionalIntArrayRef dim, const Correction& correction,
                                   bool keepdim, at::Tensor& out) {
  if (may_give(self, out) && out.scalar_type() == self.scalar_type()) {
    if (auto result = spread(self, dim, correction, keepdim, Reduction::kStd)) return give(*result, out);
  }
  fallback_of<at::_ops::std_correction_out>(self, dim, correction, keepdim, out);
  return out;
}

at::Tensor logsumexp(const at::Tensor& self, at::IntArrayRef dim, bool keepdim) {
  if (serves(self) && is_last_dim(self, at::OptionalIntArrayRef(dim))) {
    return reduce(self, Reduction::kLogSumExp, keepdim, self.scalar_type());
  }
  return fallback_of<at::_ops::logsumexp>(self, dim, keepdim);
}
at::Tensor& logsumexp_out(const at::Tensor& self, at::IntArrayRef dim, bool keepdim, at::Tensor& out) {
  if (serves(self) && may_give(self, out) && is_last_dim(self, at::OptionalIntArrayRef(dim)) &&
      out.scalar_type() == self.scalar_type()) {
    return give(reduce(self, Reduction::kLogSumExp, keepdim, self.scalar_type()), out);
  }
  fallback_of<at::_ops::logsumexp_out>(self, dim, keepdim, out);
  return out;
}

bool finds_index(const at::Tensor& self, std::optional<int64_t> dim) {
  return serves(self) && dim && is_last_dim(self, *dim) && self.size(-1) < (int64_t{1} << 32);
}
at::Tensor argmax(const at::Tensor& self, std::optional<int64_t> dim, bool keepdim) {
  if (finds_index(self, dim)) return reduce(self, Reduction::kArgMax, keepdim, at::kLong);
  return fallback_of<at::_ops::argmax>(self, dim, keepdim);
}
at::Tensor argmin(const at::Tensor& self, std::optional<int64_t> dim, bool keepdim) {
  if (finds_index(self, dim)) return reduce(self, Reduction::kArgMin, keepdim, at::kLong);
  return fallback_of<at::_ops::argmin>(self, dim, keepdim);
}
at::Tensor& argmax_out(const at::Tensor& self, std::optional<int64_t> dim, bool keepdim, at::Tensor& out) {
  if (finds_index(self, dim) && may_give(self, out) && out.scalar_type() == at::kLong) {
    return give(reduce(self, Reduction::kArgMax, keepdim, at::kLong), out);
  }
  fallback_of<at::_ops::argmax_out>(self, dim, keepdim, out);
  return out;
}
at::Tensor& argmin_out(const at::Tensor& self, std::optional<int64_t> dim, bool keepdim, at::Tensor& out) {
  if (finds_index(self, dim) && may_give(self, out) && out.scalar_type() == at::kLong) {
    return give(reduce(self, Reduction::kArgMin, keepdim, at::kLong), out);
  }
  fallback_of<at::_ops::argmin_out>(self, dim, keepdim, out);
  return out;
}

}  // namespace

QUARTZ_OPERATORS(row_reduce) {
  operators.replace<&sum>("sum.dim_IntList");
  operators.replace<&sum_out>("sum.IntList_out");
  operators.replace<&mean>("mean.dim");
  operators.replace<&mean_out>("mean.out");
  operators.replace<&var>("var.correction");
  operators.replace<&var_out>("var.correction_out");
  operators.replace<&standard_deviation>("std.correction");
  operators.replace<&standard_deviation_out>("std.correction_out");
  operators.replace<&logsumexp>("logsumexp");
  operators.replace<&logsumexp_out>("logsumexp.out");
  operators.replace<&argmax>("argmax");
  operators.replace<&argmax_out>("argmax.out");
  operators.replace<&argmin>("argmin");
  operators.replace<&argmin_out>("argmin.out");
}

}  // namespace quartz
