// linear of PyTorch, composed so that every input takes the same path, and quartz::linear with an activation.
#include "aten/linear.h"

#include <ATen/ATen.h>
#include <ATen/ops/linear_native.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/matmul_support.h"
#include "aten/operators.h"
#include "aten/registration.h"

namespace quartz {
namespace {

// PyTorch's own composition adds the bias to a rounded product for some shapes and strides, and inside the product for
// others. Here a row goes through addmm whatever the shape around it. It stays a composition of differentiable
// operators, so that gradients of any order, forward mode, vmap and tracing work as before. Dtypes without own products
// are composed as PyTorch does, so that they keep its bits.
at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const bool has_bias = bias && bias->defined();
  const auto plain = [](const at::Tensor& t) { return t.layout() == at::kStrided && !t.is_nested(); };
  if (!has_kernel_dtype(input) || !plain(input) || !plain(weight) || input.dim() == 0 || weight.dim() != 2 ||
      (has_bias && (!plain(*bias) || bias->dim() != 1 || bias->sym_size(0) != weight.sym_size(0)))) {
    return at::native::linear(input, weight, bias);
  }
  const auto product = [&](const at::Tensor& rows) {
    return has_bias ? at::addmm(*bias, rows, weight.t()) : at::mm(rows, weight.t());
  };
  if (input.dim() == 2) return product(input);
  c10::SymDimVector sizes(input.sym_sizes().begin(), input.sym_sizes().end());
  c10::SymInt rows = 1;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  const auto flat = product(input.reshape_symint({rows, sizes.back()}));
  sizes.back() = weight.sym_size(0);
  return flat.view_symint(sizes);
}

}  // namespace

kernels::Activation linear_activation(const char* op, c10::string_view name) {
  using kernels::Activation;
  static constexpr std::pair<const char*, Activation> kAll[] = {
      {"none", Activation::kNone}, {"relu", Activation::kRelu},          {"silu", Activation::kSilu},
      {"gelu", Activation::kGelu}, {"gelu_tanh", Activation::kGeluTanh}, {"gelu_quick", Activation::kGeluQuick}};
  for (const auto& [known, activation] : kAll) {
    if (name == known) return activation;
  }
  TORCH_CHECK_VALUE(false, op, ": activation must be one of none, relu, silu, gelu, gelu_tanh, gelu_quick, got ", name);
}

namespace {

at::Tensor quartz_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         c10::string_view activation, bool frozen_weight) {
  constexpr auto op = "quartz::linear";
  const at::Tensor addend = bias.value_or(at::Tensor());
  check_same_device(op, {{"x", x}, {"weight", weight}, {"bias", addend}});
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(x), op, "x", "be float32, float16 or bfloat16", x.scalar_type());
  QUARTZ_CHECK_ARGUMENT(x.dim() >= 1, op, "x", "have at least one dimension", "a scalar");
  QUARTZ_CHECK_ARGUMENT(weight.dim() == 2 && weight.size(1) == x.size(-1), op, "weight",
                        "be (n, k) for an x of (..., k)", weight.sizes(), " and ", x.sizes());
  QUARTZ_CHECK_ARGUMENT(weight.scalar_type() == x.scalar_type(), op, "weight", "have the dtype of x",
                        weight.scalar_type());
  if (addend.defined()) {
    QUARTZ_CHECK_ARGUMENT(addend.dim() == 1 && addend.size(0) == weight.size(0), op, "bias",
                          "have one element for each row of weight", addend.sizes(), " and ", weight.size(0));
    QUARTZ_CHECK_ARGUMENT(addend.scalar_type() == x.scalar_type(), op, "bias", "have the dtype of x",
                          addend.scalar_type());
  }
  Epilogue epilogue;
  epilogue.bias = addend;
  const auto kind = linear_activation(op, activation);
  epilogue.frozen_weight = frozen_weight;
  const c10::DeviceGuard guard(x.device());
  auto sizes = x.sizes().vec();
  int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  sizes.back() = weight.size(0);
  auto out = at::empty({rows, weight.size(0)}, x.options().memory_format(at::MemoryFormat::Contiguous));
  with_activation(out, kind, [&](kernels::Activation in_kernel) {
    epilogue.activation = in_kernel;
    const bool done = multiply(x.reshape({rows, x.size(-1)}), weight, out, epilogue, Second::kAsWeight);
    TORCH_INTERNAL_ASSERT(done, op, ": no kernel for these operands");
  });
  return out.view(sizes);
}

}  // namespace

QUARTZ_OPERATORS(linear) {
  for (const auto key : {c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1}) {
    permanent_library("aten", key).impl("linear", TORCH_FN(linear));
  }
  operators.define(
      "linear(Tensor x, Tensor weight, Tensor? bias=None, str activation='none', "
      "bool frozen_weight=False) -> Tensor");
  operators.implement<&quartz_linear>("linear");
}

}  // namespace quartz
