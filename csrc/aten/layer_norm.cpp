// quartz::layer_norm and aten::native_layer_norm; formula and order of arithmetic in kernels/layer_norm.h.
#include "kernels/layer_norm.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/Dispatch.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// `mean` and `rstd` have one element a row, or are null. The last `trailing` dimensions make up a row.
at::Tensor run(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps, int64_t trailing,
               float* mean, float* rstd) {
  const c10::DeviceGuard guard(x.device());
  auto y = empty_like_rows(x, x.sizes(), x.scalar_type());
  if (x.numel() == 0) return y;
  const auto rows = rows_of(x, trailing);
  const auto contiguous = [](const at::Tensor& t) { return t.defined() ? t.contiguous() : t; };
  const auto weights = contiguous(weight), biases = contiguous(bias);
  kernels::LayerNorm a{};
  a.x = rows.data();
  if (weights.defined()) a.weight = weights.const_data_ptr();
  if (biases.defined()) a.bias = biases.const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.mean = mean;
  a.rstd = rstd;
  a.rows = rows.count;
  a.width = rows.width;
  a.x_stride = rows.stride;
  a.eps = static_cast<float>(eps);
  a.dtype = kernel_dtype(x);
  a.weight_dtype = weight.defined() ? kernel_dtype(weight) : bias.defined() ? kernel_dtype(bias) : a.dtype;
  QUARTZ_RUN_KERNEL(layer_norm, x, a);
  return y;
}

void check_parameter(const char* name, const at::Tensor& parameter, int64_t width) {
  if (!parameter.defined()) return;
  const char* op = "quartz::layer_norm";
  QUARTZ_CHECK_ARGUMENT(parameter.dim() == 1 && parameter.size(0) == width, op, name,
                        "have one element for each of the last dimension of x", parameter.sizes(), " and ", width);
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(parameter), op, name, "be float32, float16 or bfloat16",
                        parameter.scalar_type());
}

at::Tensor layer_norm(const at::Tensor& x, const OptionalTensor& weight, const OptionalTensor& bias, double eps) {
  const char* op = "quartz::layer_norm";
  const auto w = weight.value_or(at::Tensor()), b = bias.value_or(at::Tensor());
  QUARTZ_CHECK_ARGUMENT(x.dim() >= 1, op, "x", "have at least one dimension", "a scalar");
  check_same_device(op, {{"x", x}, {"weight", w}, {"bias", b}});
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(x), op, "x", "be float32, float16 or bfloat16", x.scalar_type());
  check_parameter("weight", w, x.size(-1));
  check_parameter("bias", b, x.size(-1));
  QUARTZ_CHECK_ARGUMENT(!w.defined() || !b.defined() || w.scalar_type() == b.scalar_type(), op, "bias",
                        "have the dtype of weight", b.scalar_type());
  return run(x, w, b, eps, 1, nullptr, nullptr);
}

// What PyTorch's kernels accept, too: parameters of the row's shape, both of one dtype, that of x or, on the CPU,
// float32 (CUDA's backward has no such kernel).
bool serves(const at::Tensor& x, at::IntArrayRef shape, const at::Tensor& weight, const at::Tensor& bias) {
  const auto rank = static_cast<int64_t>(shape.size());
  if (!has_kernel_dtype(x) || x.numel() == 0 || rank == 0 || rank > x.dim()) return false;
  if (x.sizes().slice(x.dim() - rank) != shape) return false;
  if (weight.defined() && bias.defined() && weight.scalar_type() != bias.scalar_type()) return false;
  for (const auto* parameter : {&weight, &bias}) {
    if (!parameter->defined()) continue;
    const bool type = parameter->scalar_type() == x.scalar_type() ||
                      (parameter->scalar_type() == at::kFloat && !substrate().is_cuda());
    if (!type || parameter->sizes() != shape || parameter->device() != x.device()) return false;
  }
  return true;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> native_layer_norm(const at::Tensor& x, at::IntArrayRef shape,
                                                                 const OptionalTensor& weight,
                                                                 const OptionalTensor& bias, double eps) {
  const auto w = weight.value_or(at::Tensor()), b = bias.value_or(at::Tensor());
  if (!serves(x, shape, w, b)) {
    auto [y, mean, rstd] = fallback_of_many<at::_ops::native_layer_norm, 3>(x, shape, weight, bias, eps);
    return {y, mean, rstd};
  }
  const auto rank = static_cast<int64_t>(shape.size());
  c10::SmallVector<int64_t, 6> sizes(x.sizes().begin(), x.sizes().end() - rank);
  sizes.resize(x.dim(), 1);
  // The CPU's backward pass expects the statistics in the dtype of x, unless the parameters are wider.
  const auto parameters = w.defined() ? w.scalar_type() : b.defined() ? b.scalar_type() : x.scalar_type();
  const auto statistics = on_gpu(x) || parameters == at::kFloat ? at::kFloat : x.scalar_type();
  auto mean = empty_like_rows(x, sizes, statistics), rstd = empty_like_rows(x, sizes, statistics);
  if (statistics == at::kFloat) {
    auto y = run(x, w, b, eps, rank, mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>());
    return {y, mean, rstd};
  }
  const auto rows = static_cast<std::size_t>(mean.numel());
  std::vector<float> values(2 * rows);
  auto y = run(x, w, b, eps, rank, values.data(), values.data() + rows);
  AT_DISPATCH_REDUCED_FLOATING_TYPES(statistics, "native_layer_norm", [&] {
    std::copy_n(values.data(), rows, mean.mutable_data_ptr<scalar_t>());
    std::copy_n(values.data() + rows, rows, rstd.mutable_data_ptr<scalar_t>());
  });
  return {y, mean, rstd};
}

}  // namespace

QUARTZ_OPERATORS(layer_norm) {
  operators.define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor");
  operators.implement<&layer_norm>("layer_norm");
  operators.replace<&native_layer_norm>("native_layer_norm");
}

}  // namespace quartz
