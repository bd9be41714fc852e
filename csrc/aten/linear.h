// What the operators of linear layers share.
#pragma once

#include <ATen/ops/gelu.h>
#include <c10/util/string_view.h>

#include "aten/kernel_support.h"
#include "kernels/matmul.h"

namespace quartz {

// By its name: none, relu, silu, gelu, gelu_tanh, gelu_quick; ValueError for another.
kernels::Activation linear_activation(const char* op, c10::string_view name);

// Calls `product` with the activation that its kernel has to apply to `out`. On a GPU gelu is PyTorch's kernel behind
// the product, so that the bits are those of F.gelu.
template <class Product>
void with_activation(const at::Tensor& out, kernels::Activation activation, const Product& product) {
  const bool apart = activation == kernels::Activation::kGelu && on_gpu(out);
  product(apart ? kernels::Activation::kNone : activation);
  if (apart) at::gelu_(const_cast<at::Tensor&>(out));
}

}  // namespace quartz
