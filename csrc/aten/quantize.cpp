// quartz::quantize_* and quartz::dequantize_*; formats and arithmetic in kernels/quantize.h.
#include "aten/quantize.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"
#include "kernels/low_precision.h"
#include "kernels/quantize.h"

namespace quartz {
namespace {

using kernels::Fp4;

int64_t groups_of(int64_t columns, int64_t size) { return (columns + size - 1) / size; }

// The tensor as a matrix whose rows are its last dimension.
at::Tensor as_matrix(const char* op, const at::Tensor& w) {
  QUARTZ_CHECK_ARGUMENT(w.dim() >= 1, op, "w", "have at least one dimension", "a scalar");
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(w), op, "w", "be float32, float16 or bfloat16", w.scalar_type());
  const int64_t columns = w.size(-1), rows = columns == 0 ? 0 : w.numel() / columns;
  const auto matrix = w.reshape({rows, columns});
  return with_dense_rows(matrix);
}

std::vector<int64_t> with_last(const at::Tensor& like, int64_t last) {
  auto sizes = like.sizes().vec();
  sizes.back() = last;
  return sizes;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> quantize_fp8(const at::Tensor& w, c10::string_view granularity, int64_t block) {
  constexpr const char* kOp = "quartz::quantize_fp8";
  QUARTZ_CHECK_ARGUMENT(block >= 1, kOp, "block", "be positive", block);
  const auto matrix = as_matrix(kOp, w);
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  std::vector<int64_t> scale_sizes;
  int64_t block_rows = 1, block_columns = std::max<int64_t>(columns, 1);
  if (granularity == "tensor") {
    block_rows = std::max<int64_t>(rows, 1);
  } else if (granularity == "row") {
    scale_sizes = with_last(w, 1);
  } else if (granularity == "group") {
    block_columns = block;
    scale_sizes = with_last(w, groups_of(columns, block));
  } else if (granularity == "block") {
    QUARTZ_CHECK_ARGUMENT(w.dim() >= 2 && (w.dim() == 2 || w.size(-2) % block == 0), kOp, "w",
                          "be a matrix, or a batch of matrices whose rows are a multiple of block", w.sizes());
    block_rows = block_columns = block;
    scale_sizes = with_last(w, groups_of(columns, block));
    scale_sizes[scale_sizes.size() - 2] = groups_of(w.size(-2), block);
  } else {
    TORCH_CHECK_VALUE(false, kOp, ": granularity must be 'tensor', 'row', 'group' or 'block', got '", granularity, "'");
  }
  const c10::DeviceGuard guard(w.device());
  auto codes = at::empty(w.sizes(), w.options().dtype(at::kFloat8_e4m3fn));
  auto scales = w.numel() == 0 ? at::full(scale_sizes, 1.0, w.options().dtype(at::kFloat))
                               : at::empty(scale_sizes, w.options().dtype(at::kFloat));
  if (w.numel() == 0) return {codes, scales};
  const kernels::QuantizeFp8 arguments{matrix.const_data_ptr(),
                                       static_cast<uint8_t*>(codes.mutable_data_ptr()),
                                       scales.mutable_data_ptr<float>(),
                                       rows,
                                       columns,
                                       matrix.stride(0),
                                       block_rows,
                                       block_columns,
                                       kernel_dtype(matrix)};
  QUARTZ_RUN_KERNEL(quantize_fp8, w, arguments);
  return {codes, scales};
}

at::Tensor dequantize_fp8(const at::Tensor& codes, const at::Tensor& scales, at::ScalarType dtype, int64_t block) {
  constexpr const char* kOp = "quartz::dequantize_fp8";
  check_same_device(kOp, {{"codes", codes}, {"scales", scales}});
  QUARTZ_CHECK_ARGUMENT(codes.scalar_type() == at::kFloat8_e4m3fn, kOp, "codes", "be float8_e4m3fn",
                        codes.scalar_type());
  QUARTZ_CHECK_ARGUMENT(codes.dim() >= 1, kOp, "codes", "have at least one dimension", "a scalar");
  QUARTZ_CHECK_ARGUMENT(scales.scalar_type() == at::kFloat, kOp, "scales", "be float32", scales.scalar_type());
  const c10::DeviceGuard guard(codes.device());
  auto w = at::empty(codes.sizes(), codes.options().dtype(dtype));
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(w), kOp, "dtype", "be float32, float16 or bfloat16", dtype);
  if (w.numel() == 0) return w;
  const int64_t columns = codes.size(-1), rows = codes.numel() / columns;
  int64_t block_rows = 1, block_columns = columns;
  if (scales.numel() == 1) {
    block_rows = rows;
  } else if (scales.sizes() == c10::IntArrayRef(with_last(codes, 1))) {
    // a scale a row
  } else if (scales.sizes() == c10::IntArrayRef(with_last(codes, groups_of(columns, block)))) {
    block_columns = block;
  } else {
    auto expected = with_last(codes, groups_of(columns, block));
    if (codes.dim() >= 2) expected[expected.size() - 2] = groups_of(codes.size(-2), block);
    const bool whole = codes.dim() == 2 || (codes.dim() > 2 && codes.size(-2) % block == 0);
    QUARTZ_CHECK_ARGUMENT(whole && scales.sizes() == c10::IntArrayRef(expected), kOp, "scales",
                          "be one number, one a row, or one for each group or block of 'block' elements of codes",
                          scales.sizes(), " for codes ", codes.sizes());
    block_rows = block_columns = block;
  }
  const auto dense = codes.contiguous(), dense_scales = scales.contiguous();
  const kernels::DequantizeFp8 arguments{static_cast<const uint8_t*>(dense.const_data_ptr()),
                                         dense_scales.const_data_ptr<float>(),
                                         w.mutable_data_ptr(),
                                         rows,
                                         columns,
                                         block_rows,
                                         block_columns,
                                         kernel_dtype(w)};
  QUARTZ_RUN_KERNEL(dequantize_fp8, codes, arguments);
  return w;
}

namespace {

void quantize_fp4(const at::Tensor& matrix, Fp4 format, const at::Tensor& global, const at::Tensor& packed,
                  const at::Tensor& scales) {
  if (matrix.numel() == 0) return;
  const kernels::QuantizeFp4 arguments{matrix.const_data_ptr(),
                                       static_cast<uint8_t*>(packed.mutable_data_ptr()),
                                       static_cast<uint8_t*>(scales.mutable_data_ptr()),
                                       global.defined() ? global.const_data_ptr<float>() : nullptr,
                                       matrix.size(0),
                                       matrix.size(1),
                                       matrix.stride(0),
                                       format,
                                       kernel_dtype(matrix)};
  QUARTZ_RUN_KERNEL(quantize_fp4, matrix, arguments);
}

// Largest magnitude / (6 * 448): the largest scale of a group is then 448. 1 for zeros; what is not finite counts not.
at::Tensor global_scale_of(const at::Tensor& w) {
  if (w.numel() == 0) return at::full({}, 1.0, w.options().dtype(at::kFloat));
  const auto magnitude = w.to(at::kFloat).abs();
  const auto largest = magnitude.nan_to_num(0.0, 0.0, 0.0).max();
  const auto scale = largest / (kernels::kLargestE2M1 * kernels::kLargestE4M3);
  return at::where(scale > 0, scale, at::ones_like(scale));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize_nvfp4(const at::Tensor& w,
                                                              const std::optional<at::Tensor>& global_scale) {
  constexpr const char* kOp = "quartz::quantize_nvfp4";
  const auto matrix = as_matrix(kOp, w);
  const c10::DeviceGuard guard(w.device());
  at::Tensor global = global_scale.value_or(at::Tensor());
  if (global.defined()) {
    check_same_device(kOp, {{"w", w}, {"global_scale", global}});
    QUARTZ_CHECK_ARGUMENT(global.numel() == 1 && global.scalar_type() == at::kFloat, kOp, "global_scale",
                          "be one float32 number", global.sizes(), " of ", global.scalar_type());
  } else {
    global = global_scale_of(w);
  }
  auto packed = at::empty(with_last(w, groups_of(w.size(-1), 2)), w.options().dtype(at::kByte));
  auto scales = at::empty(with_last(w, groups_of(w.size(-1), 16)), w.options().dtype(at::kFloat8_e4m3fn));
  quantize_fp4(matrix, Fp4::kNv, global, packed, scales);
  return {packed, scales, global};
}

std::tuple<at::Tensor, at::Tensor> quantize_mxfp4(const at::Tensor& w) {
  const auto matrix = as_matrix("quartz::quantize_mxfp4", w);
  const c10::DeviceGuard guard(w.device());
  auto packed = at::empty(with_last(w, groups_of(w.size(-1), 2)), w.options().dtype(at::kByte));
  auto scales = at::empty(with_last(w, groups_of(w.size(-1), 32)), w.options().dtype(at::kFloat8_e8m0fnu));
  quantize_fp4(matrix, Fp4::kMx, {}, packed, scales);
  return {packed, scales};
}

at::Tensor dequantize_fp4(const char* op, Fp4 format, const at::Tensor& packed, const at::Tensor& scales,
                          const at::Tensor& global, int64_t columns, at::ScalarType dtype) {
  check_same_device(op, {{"packed", packed}, {"scales", scales}, {"global_scale", global}});
  QUARTZ_CHECK_ARGUMENT(packed.scalar_type() == at::kByte && packed.dim() >= 1, op, "packed",
                        "be uint8 with at least one dimension", packed.scalar_type());
  QUARTZ_CHECK_ARGUMENT(packed.size(-1) == groups_of(columns, 2), op, "columns",
                        "be the number of elements of a row, of which two share a byte", columns, " for ",
                        packed.sizes());
  const auto code = format == Fp4::kNv ? at::kFloat8_e4m3fn : at::kFloat8_e8m0fnu;
  QUARTZ_CHECK_ARGUMENT(scales.scalar_type() == code || scales.scalar_type() == at::kByte, op, "scales",
                        (format == Fp4::kNv ? "be float8_e4m3fn or its bytes" : "be float8_e8m0fnu or its bytes"),
                        scales.scalar_type());
  QUARTZ_CHECK_ARGUMENT(
      scales.sizes() == c10::IntArrayRef(with_last(packed, groups_of(columns, kernels::group_of(format)))), op,
      "scales", (format == Fp4::kNv ? "be one for each 16 elements of a row" : "be one for each 32 elements of a row"),
      scales.sizes(), " for ", columns, " columns");
  QUARTZ_CHECK_ARGUMENT(!global.defined() || (global.numel() == 1 && global.scalar_type() == at::kFloat), op,
                        "global_scale", "be one float32 number", global.sizes());
  const c10::DeviceGuard guard(packed.device());
  auto w = at::empty(with_last(packed, columns), packed.options().dtype(dtype));
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(w), op, "dtype", "be float32, float16 or bfloat16", dtype);
  if (w.numel() == 0) return w;
  const auto dense = packed.contiguous(), dense_scales = scales.contiguous();
  const kernels::DequantizeFp4 arguments{static_cast<const uint8_t*>(dense.const_data_ptr()),
                                         static_cast<const uint8_t*>(dense_scales.const_data_ptr()),
                                         global.defined() ? global.const_data_ptr<float>() : nullptr,
                                         w.mutable_data_ptr(),
                                         w.numel() / columns,
                                         columns,
                                         format,
                                         kernel_dtype(w)};
  QUARTZ_RUN_KERNEL(dequantize_fp4, packed, arguments);
  return w;
}

at::Tensor dequantize_nvfp4(const at::Tensor& packed, const at::Tensor& scales,
                            const std::optional<at::Tensor>& global_scale, int64_t columns, at::ScalarType dtype) {
  return dequantize_fp4("quartz::dequantize_nvfp4", Fp4::kNv, packed, scales, global_scale.value_or(at::Tensor()),
                        columns, dtype);
}

at::Tensor dequantize_mxfp4(const at::Tensor& packed, const at::Tensor& scales, int64_t columns, at::ScalarType dtype) {
  return dequantize_fp4("quartz::dequantize_mxfp4", Fp4::kMx, packed, scales, {}, columns, dtype);
}

}  // namespace

QUARTZ_OPERATORS(quantize) {
  operators.define("quantize_fp8(Tensor w, str granularity='tensor', int block=128) -> (Tensor, Tensor)");
  operators.implement<&quantize_fp8>("quantize_fp8");
  operators.define("dequantize_fp8(Tensor codes, Tensor scales, ScalarType dtype, int block=128) -> Tensor");
  operators.implement<&dequantize_fp8>("dequantize_fp8");
  operators.define("quantize_nvfp4(Tensor w, Tensor? global_scale=None) -> (Tensor, Tensor, Tensor)");
  operators.implement<&quantize_nvfp4>("quantize_nvfp4");
  operators.define(
      "dequantize_nvfp4(Tensor packed, Tensor scales, Tensor? global_scale, int columns, ScalarType dtype) -> Tensor");
  operators.implement<&dequantize_nvfp4>("dequantize_nvfp4");
  operators.define("quantize_mxfp4(Tensor w) -> (Tensor, Tensor)");
  operators.implement<&quantize_mxfp4>("quantize_mxfp4");
  operators.define("dequantize_mxfp4(Tensor packed, Tensor scales, int columns, ScalarType dtype) -> Tensor");
  operators.implement<&dequantize_mxfp4>("dequantize_mxfp4");
}

}  // namespace quartz
