// Conversions between padded and jagged tensors, of bool, on the cuda substrate. The native kernels take floating
// dtypes only; PyTorch's Python code (torch/nested/_internal/ops.py) casts bool itself, but only where the device says
// "cuda".
#include <ATen/ops/_jagged_to_padded_dense_forward.h>
#include <ATen/ops/_padded_dense_to_jagged_forward.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

using at::Tensor;

Tensor as_number(const Tensor& tensor) { return tensor.scalar_type() == at::kBool ? tensor.to(at::kHalf) : tensor; }

std::vector<Tensor> native_offsets(at::TensorList offsets, AliasScope& scope) {
  std::vector<Tensor> native;
  native.reserve(offsets.size());
  for (const auto& offset : offsets) native.push_back(scope.to_native(offset));
  return native;
}

Tensor padded_to_jagged(const Tensor& dense, at::TensorList offsets, std::optional<int64_t> total) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto padded = scope.to_native(dense);
  const auto native = native_offsets(offsets, scope);
  scope.check_operands("aten::_padded_dense_to_jagged_forward");
  const auto values = at::_padded_dense_to_jagged_forward(as_number(padded), native, total);
  return scope.to_quartz(values.to(padded.scalar_type()));
}

Tensor jagged_to_padded(const Tensor& values, at::TensorList offsets, at::IntArrayRef max_lengths, double padding) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto jagged = scope.to_native(values);
  const auto native = native_offsets(offsets, scope);
  scope.check_operands("aten::_jagged_to_padded_dense_forward");
  const auto dense = at::_jagged_to_padded_dense_forward(as_number(jagged), native, max_lengths, padding);
  return scope.to_quartz(dense.to(jagged.scalar_type()));
}

}  // namespace

void register_jagged(torch::Library& library) {
  own_kernel<&padded_to_jagged>(library, "_padded_dense_to_jagged_forward");
  own_kernel<&jagged_to_padded>(library, "_jagged_to_padded_dense_forward");
}

}  // namespace quartz
