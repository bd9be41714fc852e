// The arguments that make a quantised weight of an operator, checked, as kernels/quantized_weight.h describes it.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/quantized_weight.h"

namespace quartz {

struct QuantizedArgument {
  kernels::QuantizedWeight w;
  int64_t batch, n, k;
  at::Tensor codes, scales, outer;  // what w points to
};

// `name`: what errors call the codes. `dim`: 2 for a matrix [n, k], 3 for a stack of them. `k` is the number of
// columns, which packed codes do not tell.
//   fp8             codes float8_e4m3fn [.., n, k]; scales float32: one number; of a matrix each ([b], [b, 1, 1]); of a
//                   row ([.., n, 1], [.., n]); of `block` of a row [.., n, k / block] or of `block` x `block` [.., n /
//                   block, k / block], both rounded up. The first shape that fits counts.
//   nvfp4, mxfp4    codes uint8 [.., n, (k + 1) / 2]; scales [.., n, k / 16 or k / 32 rounded up], float8_e4m3fn or
//                   float8_e8m0fnu or their bytes; `global_scale` float32: one number, of a matrix or of a row
QuantizedArgument quantized_argument(const char* op, const char* name, c10::string_view format, const at::Tensor& codes,
                                     const at::Tensor& scales, const std::optional<at::Tensor>& global_scale, int64_t k,
                                     int64_t block, int64_t dim);

// The weight as a contiguous tensor of `dtype`, without the outer scale: rows [begin, end) of every matrix. On a GPU.
at::Tensor decoded_on_gpu(const QuantizedArgument& weight, at::ScalarType dtype, int64_t begin, int64_t end);

}  // namespace quartz
