#include "aten/matmul_support.h"

#include <algorithm>
#include <limits>

#include <ATen/Context.h>
#if __has_include(<ATen/core/NamedTensor.h>)
#include <ATen/core/NamedTensor.h>
#endif

#include "aten/alias.h"
#include "aten/kernel_support.h"
#include "aten/parallel.h"

#if QUARTZ_WITH_CUDA
#include <ATen/ops/empty.h>

#include "kernels/matmul_cuda.h"
#endif

namespace quartz {
namespace {

// Of a tensor that is expanded to a matrix or a batch of them.
kernels::Matmul::Strides expanded_strides(const at::Tensor& tensor, int64_t dim) {
  const auto stride = [&](int64_t from_end) -> int64_t {
    const int64_t i = tensor.dim() - from_end;
    return i < 0 || from_end > dim || tensor.size(i) == 1 ? 0 : tensor.stride(i);
  };
  return {stride(3), stride(2), stride(1)};
}

bool has_names([[maybe_unused]] const at::Tensor& tensor) {  // PyTorch up to 2.12
#if __has_include(<ATen/core/NamedTensor.h>)
  return at::impl::has_names(tensor.unsafeGetTensorImpl());
#else
  return false;
#endif
}

bool asks_for_tf32([[maybe_unused]] const at::Tensor& tensor) {
#if QUARTZ_WITH_CUDA
  return tensor.scalar_type() == at::kFloat && on_gpu(tensor) && at::globalContext().allowTF32CuBLAS();
#else
  return false;
#endif
}

#if QUARTZ_WITH_CUDA
// Without bias and activation.
kernels::cuda::Matmul gpu_call(const kernels::Matmul& a, const at::Tensor& out) {
  kernels::cuda::Matmul call{};
  call.x = a.x;
  call.w = a.w;
  call.out = a.out;
  call.batch = a.batch;
  call.m = a.m;
  call.n = a.n;
  call.k = a.k;
  call.x_batch = a.x_strides.batch;
  call.x_row = a.x_strides.row;
  call.x_k = a.x_strides.column;
  call.w_batch = a.w_strides.batch;
  call.w_row = a.w_strides.row;
  call.w_k = a.w_strides.column;
  call.out_batch = a.out_strides.batch;
  call.out_row = a.out_strides.row;
  call.dtype = call.bias_dtype = a.dtype;
  call.out_dtype = a.out_dtype;
  call.alpha = a.alpha;
  call.stream = current_gpu_stream(out);
  return call;
}

bool multiply_on_gpu(const kernels::Matmul& a, const at::Tensor& out, const Epilogue& epilogue) {
  if (out.stride(-1) != 1 && a.n > 1) {
    const auto rows = at::empty(out.sizes(), out.options());
    auto copy = a;
    copy.out = rows.mutable_data_ptr();
    copy.out_strides = matrix_strides(rows);
    if (!multiply_on_gpu(copy, rows, epilogue)) return false;
    out.copy_(rows);
    return true;
  }
  auto bias = epilogue.bias;
  if (bias.defined() && a.bias_strides.column != 1 && a.n > 1) bias = bias.expand(out.sizes()).contiguous();
  auto call = gpu_call(a, out);
  if (bias.defined()) {
    const auto strides = expanded_strides(bias, out.dim());
    call.bias = bias.const_data_ptr();
    call.bias_batch = strides.batch;
    call.bias_row = strides.row;
  }
  call.beta = a.beta;
  call.activation = gpu_activation(a.activation);
  call.frozen_weights = epilogue.frozen_weight;
  return kernels::cuda::matmul(call);
}
#endif

}  // namespace

#if QUARTZ_WITH_CUDA
kernels::cuda::Activation gpu_activation(kernels::Activation activation) {
  switch (activation) {
    case kernels::Activation::kNone:
      return kernels::cuda::Activation::kNone;
    case kernels::Activation::kRelu:
      return kernels::cuda::Activation::kRelu;
    case kernels::Activation::kSilu:
      return kernels::cuda::Activation::kSilu;
    case kernels::Activation::kGelu:
      return kernels::cuda::Activation::kGelu;
    case kernels::Activation::kGeluTanh:
      return kernels::cuda::Activation::kGeluTanh;
    case kernels::Activation::kGeluQuick:
      return kernels::cuda::Activation::kGeluQuick;
  }
  TORCH_INTERNAL_ASSERT(false, "an unknown activation");
}
#endif

bool multipliable(std::initializer_list<at::Tensor> tensors) {
  const at::Tensor& first = *tensors.begin();
  if (!first.defined() || !has_kernel_dtype(first) || asks_for_tf32(first)) return false;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !is_quartz(tensor) || tensor.device() != first.device() ||
        tensor.scalar_type() != first.scalar_type() || tensor.is_neg() || has_names(tensor) ||
        has_special_layout(tensor.key_set()) || tensor.layout() != at::kStrided) {
      return false;
    }
  }
  return true;
}

kernels::Matmul::Strides matrix_strides(const at::Tensor& tensor) {
  return {tensor.dim() == 3 ? tensor.stride(0) : 0, tensor.stride(-2), tensor.stride(-1)};
}

bool multiply(const at::Tensor& x, const at::Tensor& y, const at::Tensor& out, const Epilogue& epilogue,
              Second second) {
  if (out.numel() == 0) return true;
  kernels::Matmul a{};
  a.x = x.const_data_ptr();
  a.w = y.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.x_strides = matrix_strides(x);
  a.w_strides = matrix_strides(y);
  if (second == Second::kAsMatrix) std::swap(a.w_strides.row, a.w_strides.column);
  a.out_strides = matrix_strides(out);
  if (epilogue.bias.defined()) {
    a.bias = epilogue.bias.const_data_ptr();
    a.bias_strides = expanded_strides(epilogue.bias, out.dim());
  }
  a.batch = out.dim() == 3 ? out.size(0) : 1;
  a.m = out.size(-2);
  a.n = out.size(-1);
  a.k = epilogue.alpha == 0 ? 0 : x.size(-1);  // as BLAS: a product times 0 is not computed, NaN or not
  a.alpha = static_cast<float>(epilogue.alpha);
  a.beta = static_cast<float>(epilogue.beta);
  a.activation = epilogue.activation;
  a.dtype = kernel_dtype(x);
  a.out_dtype = kernel_dtype(out);
#if QUARTZ_WITH_CUDA
  if (on_gpu(out)) return multiply_on_gpu(a, out, epilogue);
#endif
  kernels::cpu::matmul(a, at_parallel());
  return true;
}

void multiply_groups(const kernels::Matmul& a, [[maybe_unused]] const at::Tensor& out) {
#if QUARTZ_WITH_CUDA
  if (on_gpu(out)) {
    const auto call = gpu_call(a, out);
    const auto workspace =
        at::empty({kernels::cuda::matmul_grouped_workspace(call, a.ragged)}, out.options().dtype(at::kByte));
    kernels::cuda::matmul_grouped(call, a.ragged, a.offsets, workspace.mutable_data_ptr());
    return;
  }
#endif
  kernels::cpu::matmul(a, at_parallel());
}

bool fit_groups(const at::Tensor& x, const at::Tensor& y) {
  if (!on_gpu(x)) return true;
  constexpr int64_t kMost = std::numeric_limits<int>::max() / 2;  // the kernels count rows in 32 bits
  const auto fits = [](const at::Tensor& t) {
    return std::all_of(t.sizes().begin(), t.sizes().end(), [](int64_t size) { return size <= kMost; });
  };
  return fits(x) && fits(y);
}

}  // namespace quartz
