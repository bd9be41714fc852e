// quartz::linear_quantized: a product with a weight of float8, NVFP4 or MXFP4 codes. Formats in quantized_weight.h.
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/linear.h"
#include "aten/matmul_support.h"
#include "aten/operators.h"
#include "aten/quantize.h"
#include "aten/quantized_weight.h"

#if QUARTZ_WITH_CUDA
#include "kernels/quantized_cuda.h"
#endif

namespace quartz {
namespace {

constexpr const char* kOp = "quartz::linear_quantized";
constexpr int64_t kInputGroup = 128;  // elements of a row of x that share a scale

void multiply_on_cpu(const at::Tensor& x, const QuantizedArgument& weight, const at::Tensor& x_scales,
                     const at::Tensor& bias, kernels::Activation activation, const at::Tensor& out) {
  kernels::Matmul a{};
  a.x = x.const_data_ptr();
  a.x_strides = matrix_strides(x);
  a.w_strides = {0, weight.k, 1};
  a.quantized = weight.w;
  if (x_scales.defined()) a.x_scales = x_scales.const_data_ptr<float>();
  if (bias.defined()) {
    a.bias = bias.const_data_ptr();
    a.bias_strides = {0, 0, bias.stride(0)};
  }
  a.out = out.mutable_data_ptr();
  a.out_strides = matrix_strides(out);
  a.batch = 1;
  a.m = x.size(0);
  a.n = weight.n;
  a.k = weight.k;
  a.alpha = a.beta = 1.0f;
  a.activation = activation;
  a.dtype = a.out_dtype = kernel_dtype(x);
  kernels::cpu::matmul(a, at_parallel());
}

#if QUARTZ_WITH_CUDA
constexpr int64_t kFewRows = 64;                        // decoded inside the product
constexpr int64_t kDecodedElements = int64_t{1} << 25;  // of a slice of the weight

void multiply_on_gpu(const at::Tensor& x, const QuantizedArgument& weight, const at::Tensor& x_scales,
                     const at::Tensor& bias, kernels::Activation activation, const at::Tensor& out) {
  kernels::cuda::QuantizedMatmul a{};
  auto& product = a.product;
  product.x = x.const_data_ptr();
  product.x_row = x.stride(0);
  product.x_k = x.stride(1);
  product.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  product.out = out.mutable_data_ptr();
  product.out_row = out.stride(0);
  product.batch = 1;
  product.m = x.size(0);
  product.n = weight.n;
  product.k = weight.k;
  product.dtype = product.out_dtype = product.bias_dtype = kernel_dtype(x);
  product.activation = gpu_activation(activation);
  product.stream = current_gpu_stream(x);
  a.w = weight.w;
  if (x_scales.defined()) a.x_scales = x_scales.const_data_ptr<float>();
  if (product.m <= kFewRows && kernels::cuda::quantized_matmul(a)) return;

  // The weight is decoded a slice of rows at a time, into memory that the next slice uses again.
  const int64_t block = weight.w.block_rows;
  const int64_t rows = std::max<int64_t>(1, kDecodedElements / std::max<int64_t>(1, weight.k) / block) * block;
  for (int64_t begin = 0; begin < weight.n; begin += rows) {
    const int64_t end = std::min(begin + rows, weight.n);
    const auto w = decoded_on_gpu(weight, x.scalar_type(), begin, end).squeeze(0);
    const auto part = out.narrow(1, begin, end - begin);
    Epilogue epilogue;
    if (weight.w.outer == nullptr && !x_scales.defined()) {
      if (bias.defined()) epilogue.bias = bias.narrow(0, begin, end - begin);
      epilogue.activation = activation;
      const bool done = multiply(x, w, part, epilogue, Second::kAsWeight);
      TORCH_INTERNAL_ASSERT(done, kOp, ": no kernel for these operands");
      continue;
    }
    const auto sums = at::empty(part.sizes(), x.options().dtype(at::kFloat));
    const bool done = multiply(x, w, sums, epilogue, Second::kAsWeight);
    TORCH_INTERNAL_ASSERT(done, kOp, ": no kernel for these operands");
    auto finish = a;
    finish.product.n = end - begin;
    finish.product.out = part.mutable_data_ptr();
    if (bias.defined()) finish.product.bias = bias.narrow(0, begin, end - begin).const_data_ptr();
    if (finish.w.outer != nullptr) finish.w.outer += begin * finish.w.outer_row;
    kernels::cuda::finish_quantized(finish, sums.const_data_ptr<float>());
  }
}
#endif

at::Tensor linear_quantized(const at::Tensor& x, const at::Tensor& codes, const at::Tensor& scales,
                            const std::optional<at::Tensor>& global_scale, const std::optional<at::Tensor>& bias,
                            c10::string_view format, int64_t block, c10::string_view activation,
                            c10::string_view quantize_input) {
  const at::Tensor addend = bias.value_or(at::Tensor());
  check_same_device(kOp, {{"x", x}, {"codes", codes}, {"bias", addend}});
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(x), kOp, "x", "be float32, float16 or bfloat16", x.scalar_type());
  QUARTZ_CHECK_ARGUMENT(x.dim() >= 1, kOp, "x", "have at least one dimension", "a scalar");
  const int64_t k = x.size(-1);
  const auto weight = quantized_argument(kOp, "codes", format, codes, scales, global_scale, k, block, 2);
  if (addend.defined()) {
    QUARTZ_CHECK_ARGUMENT(addend.dim() == 1 && addend.size(0) == weight.n, kOp, "bias",
                          "have one element for each row of codes", addend.sizes(), " and ", weight.n);
    QUARTZ_CHECK_ARGUMENT(addend.scalar_type() == x.scalar_type(), kOp, "bias", "have the dtype of x",
                          addend.scalar_type());
  }
  const auto kind = linear_activation(kOp, activation);
  TORCH_CHECK_VALUE(quantize_input == "none" || quantize_input == "token" || quantize_input == "group", kOp,
                    ": quantize_input must be 'none', 'token' or 'group', got '", quantize_input, "'");
  const c10::DeviceGuard guard(x.device());
  auto sizes = x.sizes().vec();
  int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  sizes.back() = weight.n;
  auto out = at::empty({rows, weight.n}, x.options().memory_format(at::MemoryFormat::Contiguous));
  if (out.numel() == 0) return out.view(sizes);
  auto input = x.reshape({rows, k});
  at::Tensor input_scales;
  if (quantize_input != "none" && k > 0) {
    const auto [input_codes, of_codes] = quantize_fp8(input, quantize_input == "token" ? "row" : "group", kInputGroup);
    if (quantize_input == "token") {  // the codes take part; their scale comes after the sum
      input_scales = of_codes;
      input = dequantize_fp8(input_codes, at::ones({}, of_codes.options()), x.scalar_type(), kInputGroup);
    } else {
      input = dequantize_fp8(input_codes, of_codes, x.scalar_type(), kInputGroup);
    }
  }
#if QUARTZ_WITH_CUDA
  if (on_gpu(x)) {
    with_activation(out, kind, [&](kernels::Activation in_kernel) {
      multiply_on_gpu(input, weight, input_scales, addend.defined() ? addend.contiguous() : addend, in_kernel, out);
    });
    return out.view(sizes);
  }
#endif
  multiply_on_cpu(input, weight, input_scales, addend, kind, out);
  return out.view(sizes);
}

}  // namespace

QUARTZ_OPERATORS(linear_quantized) {
  operators.define(
      "linear_quantized(Tensor x, Tensor codes, Tensor scales, Tensor? global_scale=None, Tensor? bias=None, "
      "str format='fp8', int block=128, str activation='none', str quantize_input='none') -> Tensor");
  operators.implement<&linear_quantized>("linear_quantized");
}

}  // namespace quartz
