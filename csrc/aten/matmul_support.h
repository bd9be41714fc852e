// Between tensors and the product kernels: what they serve, and the call on either substrate. For the files of
// operators that are products (matmul.cpp, linear.cpp, grouped_mm.cpp).
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/matmul.h"

#if QUARTZ_WITH_CUDA
#include "kernels/matmul_cuda.h"
#endif

namespace quartz {

// Plain tensors on quartz of one device and one of the kernels' dtypes; on a GPU, none that asks for TF32.
bool multipliable(std::initializer_list<at::Tensor> tensors);

struct Epilogue {
  at::Tensor bias;  // of any shape that expands to that of out, or undefined
  double alpha = 1, beta = 1;
  kernels::Activation activation = kernels::Activation::kNone;
  // Nothing that is in flight on the GPU writes y: it may be read before the kernels before this one have ended.
  bool frozen_weight = false;
};

enum class Second { kAsMatrix, kAsWeight };  // y is [k, n], as in mm, or [n, k], as in linear

// out = activation(alpha x y + beta bias); x is [m, k] or [b, m, k], y and out as well, of any strides. False, with
// nothing written, if no kernel serves it, which can happen on a GPU only.
bool multiply(const at::Tensor& x, const at::Tensor& y, const at::Tensor& out, const Epilogue& epilogue,
              Second second = Second::kAsMatrix);

#if QUARTZ_WITH_CUDA
kernels::cuda::Activation gpu_activation(kernels::Activation activation);
#endif
// Products of groups, a.ragged and a.offsets (on the device of out) set, of sizes that fit_groups; see
// kernels/matmul.h. On a GPU the offsets are not checked, and rows or columns of no group become 0
// (kernels/matmul_cuda.h).
void multiply_groups(const kernels::Matmul& a, const at::Tensor& out);
bool fit_groups(const at::Tensor& x, const at::Tensor& y);

// The strides of a matrix, or of a batch of them, in the last two dimensions of a tensor.
kernels::Matmul::Strides matrix_strides(const at::Tensor& tensor);

}  // namespace quartz
