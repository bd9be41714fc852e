// quartz::quantize_fp8 and quartz::dequantize_fp8, for operators that quantise their input.
#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

namespace quartz {

std::tuple<at::Tensor, at::Tensor> quantize_fp8(const at::Tensor& w, c10::string_view granularity, int64_t block);
at::Tensor dequantize_fp8(const at::Tensor& codes, const at::Tensor& scales, at::ScalarType dtype, int64_t block);

}  // namespace quartz
