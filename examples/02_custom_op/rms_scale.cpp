// example_cpp::rms_scale(x, weight, eps) = x / sqrt(mean(x^2, last dimension) + eps) * weight, with a native quartz
// kernel.
//
// Built by examples/02_custom_op.py (torch.utils.cpp_extension) or by the CMakeLists.txt beside this file.
#include <quartz/aten/alias.h>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cmath>

namespace {

using at::Tensor;

void check(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK(x.dim() >= 1, "rms_scale: x must have at least one dimension, got a scalar");
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == x.size(-1), "rms_scale: weight must have shape [", x.size(-1),
              "], the last dimension of x, got ", weight.sizes());
  TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "rms_scale: weight must have the dtype of x, ", x.scalar_type(),
              ", got ", weight.scalar_type());
}

// The arithmetic, on plain pointers.
template <class T>
void rms_scale_rows(const T* x, const T* weight, T* out, int64_t rows, int64_t width, double eps) {
  at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      double sum = 0;
      for (int64_t i = 0; i < width; i++) sum += static_cast<double>(x[row * width + i]) * x[row * width + i];
      const auto inverse = static_cast<T>(1.0 / std::sqrt(sum / static_cast<double>(width) + eps));
      for (int64_t i = 0; i < width; i++) out[row * width + i] = x[row * width + i] * inverse * weight[i];
    }
  });
}

Tensor rms_scale_host(const Tensor& x, const Tensor& weight, double eps) {
  const auto dense = x.contiguous(), dense_weight = weight.contiguous();
  auto out = at::empty_like(dense);  // on the device of x: quartz memory for a quartz tensor
  const auto width = x.size(-1);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "rms_scale", [&] {
    rms_scale_rows(dense.const_data_ptr<scalar_t>(), dense_weight.const_data_ptr<scalar_t>(),
                   out.mutable_data_ptr<scalar_t>(), width == 0 ? 0 : x.numel() / width, width, eps);
  });
  return out;
}

// GPU memory: a CUDA kernel would be launched here with the same pointers. Operators of PyTorch on the native aliases
// do as well, and need no nvcc.
Tensor rms_scale_cuda(const Tensor& x, const Tensor& weight, double eps) {
  return x * (x.square().mean(-1, /*keepdim=*/true) + eps).rsqrt() * weight;
}

Tensor rms_scale_quartz(const Tensor& x, const Tensor& weight, double eps) {
  check(x, weight);
  TORCH_CHECK(weight.device() == x.device(), "rms_scale: weight must be on the device of x, ", x.device(), ", got ",
              weight.device());
  if (!quartz::substrate().is_cuda()) return rms_scale_host(x, weight, eps);
  const c10::impl::ExcludeDispatchKeyGuard below(quartz::kAboveKernels);
  quartz::AliasScope scope(x.device());  // results share memory with arguments where the kernel makes them
  return scope.to_quartz(rms_scale_cuda(scope.to_native(x), scope.to_native(weight), eps));
}

Tensor rms_scale_cpu(const Tensor& x, const Tensor& weight, double eps) {
  check(x, weight);
  return rms_scale_host(x, weight, eps);
}

TORCH_LIBRARY(example_cpp, m) { m.def("rms_scale(Tensor x, Tensor weight, float eps) -> Tensor"); }
TORCH_LIBRARY_IMPL(example_cpp, PrivateUse1, m) { m.impl("rms_scale", rms_scale_quartz); }  // quartz
TORCH_LIBRARY_IMPL(example_cpp, CPU, m) { m.impl("rms_scale", rms_scale_cpu); }

}  // namespace
