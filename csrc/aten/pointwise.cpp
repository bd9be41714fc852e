// sigmoid, silu, rsqrt, softplus and gelu of float32, bfloat16 and float16 tensors in host memory, where the native
// kernel's bits depend on an element's place in memory; all else runs the native kernel. Formulas in
// kernels/pointwise.h.
#include "kernels/pointwise.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/softplus_ops.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

using kernels::PointwiseFunction;

bool serves(const at::Tensor& x) {
  return has_kernel_dtype(x) && x.layout() == at::kStrided && x.numel() > 0 && !x.is_conj() && !x.is_neg();
}

at::Tensor run(const at::Tensor& self, PointwiseFunction function, double beta = 1, double threshold = 20) {
  const auto x = self.is_non_overlapping_and_dense() ? self : self.contiguous();
  auto y = at::empty_like(x);  // in the order of x in memory
  const kernels::Pointwise a{x.const_data_ptr(),       y.mutable_data_ptr(),          x.numel(),      function,
                             static_cast<float>(beta), static_cast<float>(threshold), kernel_dtype(x)};
  kernels::cpu::pointwise(a, at_parallel());
  return y;
}

// The operator, its in-place form where there is one, and its out= form.
#define QUARTZ_POINTWISE(NAME, FUNCTION)                                                        \
  at::Tensor NAME(const at::Tensor& self) {                                                     \
    return serves(self) ? run(self, FUNCTION) : fallback_of<at::_ops::NAME>(self);              \
  }                                                                                             \
  at::Tensor& NAME##_in_place(at::Tensor& self) {                                               \
    if (serves(self)) return self.copy_(run(self, FUNCTION));                                   \
    fallback_of<at::_ops::NAME##_>(self);                                                       \
    return self;                                                                                \
  }                                                                                             \
  at::Tensor& NAME##_out(const at::Tensor& self, at::Tensor& out) {                             \
    if (serves(self) && may_give_apart(self, out) && out.scalar_type() == self.scalar_type()) { \
      return give(run(self, FUNCTION), out);                                                    \
    }                                                                                           \
    fallback_of<at::_ops::NAME##_out>(self, out);                                               \
    return out;                                                                                 \
  }
QUARTZ_POINTWISE(sigmoid, PointwiseFunction::kSigmoid)
QUARTZ_POINTWISE(silu, PointwiseFunction::kSilu)
QUARTZ_POINTWISE(rsqrt, PointwiseFunction::kRsqrt)
#undef QUARTZ_POINTWISE

at::Tensor softplus(const at::Tensor& self, const at::Scalar& beta, const at::Scalar& threshold) {
  if (serves(self)) return run(self, PointwiseFunction::kSoftplus, beta.toDouble(), threshold.toDouble());
  return fallback_of<at::_ops::softplus>(self, beta, threshold);
}
at::Tensor& softplus_out(const at::Tensor& self, const at::Scalar& beta, const at::Scalar& threshold, at::Tensor& out) {
  if (serves(self) && may_give_apart(self, out) && out.scalar_type() == self.scalar_type()) {
    return give(run(self, PointwiseFunction::kSoftplus, beta.toDouble(), threshold.toDouble()), out);
  }
  fallback_of<at::_ops::softplus_out>(self, beta, threshold, out);
  return out;
}

bool serves_gelu(const at::Tensor& self, c10::string_view approximate) {
  return serves(self) && (approximate == "none" || approximate == "tanh");
}
at::Tensor run_gelu(const at::Tensor& self, c10::string_view approximate) {
  return run(self, approximate == "tanh" ? PointwiseFunction::kGeluTanh : PointwiseFunction::kGelu);
}
at::Tensor gelu(const at::Tensor& self, c10::string_view approximate) {
  return serves_gelu(self, approximate) ? run_gelu(self, approximate) : fallback_of<at::_ops::gelu>(self, approximate);
}
at::Tensor& gelu_in_place(at::Tensor& self, c10::string_view approximate) {
  if (serves_gelu(self, approximate)) return self.copy_(run_gelu(self, approximate));
  fallback_of<at::_ops::gelu_>(self, approximate);
  return self;
}
at::Tensor& gelu_out(const at::Tensor& self, c10::string_view approximate, at::Tensor& out) {
  if (serves_gelu(self, approximate) && may_give_apart(self, out) && out.scalar_type() == self.scalar_type()) {
    return give(run_gelu(self, approximate), out);
  }
  fallback_of<at::_ops::gelu_out>(self, approximate, out);
  return out;
}

}  // namespace

QUARTZ_OPERATORS(pointwise) {
  if (substrate().is_cuda()) return;  // CUDA's kernels compute every element in one way
  operators.replace<&sigmoid>("sigmoid");
  operators.replace<&sigmoid_in_place>("sigmoid_");
  operators.replace<&sigmoid_out>("sigmoid.out");
  operators.replace<&silu>("silu");
  operators.replace<&silu_in_place>("silu_");
  operators.replace<&silu_out>("silu.out");
  operators.replace<&rsqrt>("rsqrt");
  operators.replace<&rsqrt_in_place>("rsqrt_");
  operators.replace<&rsqrt_out>("rsqrt.out");
  operators.replace<&softplus>("softplus");
  operators.replace<&softplus_out>("softplus.out");
  operators.replace<&gelu>("gelu");
  operators.replace<&gelu_in_place>("gelu_");
  operators.replace<&gelu_out>("gelu.out");
}

}  // namespace quartz
