#include "aten/quantized_weight.h"

#include <ATen/ops/empty.h>

#include "aten/kernel_support.h"

#if QUARTZ_WITH_CUDA
#include "kernels/quantized_cuda.h"
#endif

namespace quartz {
namespace {

using kernels::WeightFormat;

WeightFormat format_of(const char* op, c10::string_view name) {
  if (name == "fp8") return WeightFormat::kFp8;
  if (name == "nvfp4") return WeightFormat::kNvFp4;
  if (name == "mxfp4") return WeightFormat::kMxFp4;
  TORCH_CHECK_VALUE(false, op, ": format must be 'fp8', 'nvfp4' or 'mxfp4', got '", name, "'");
}

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

// Scales of whole matrices or rows: multiplied with the sums. False if the shape is none of theirs.
bool take_outer(QuantizedArgument& a, const at::Tensor& scales) {
  const auto sizes = scales.sizes();
  const auto is = [&](std::initializer_list<int64_t> expected) { return sizes == c10::IntArrayRef(expected); };
  const bool stack = a.codes.dim() == 3;
  int64_t each_batch = 0, each_row = 0;
  if (scales.numel() == 1) {
    // one number
  } else if (stack && (is({a.batch}) || is({a.batch, 1}) || is({a.batch, 1, 1}))) {
    each_batch = 1;
  } else if (stack ? is({a.batch, a.n, 1}) || is({a.batch, a.n}) : is({a.n, 1}) || is({a.n})) {
    each_batch = stack ? a.n : 0;
    each_row = 1;
  } else {
    return false;
  }
  a.outer = scales.contiguous();
  a.w.outer = a.outer.const_data_ptr<float>();
  a.w.outer_batch = each_batch;
  a.w.outer_row = each_row;
  return true;
}

void take_inner(QuantizedArgument& a, const at::Tensor& scales, int64_t rows, int64_t block_rows,
                int64_t block_columns) {
  a.scales = scales.contiguous();
  a.w.scales = a.scales.const_data_ptr();
  a.w.scales_row = a.scales.size(-1);
  a.w.scales_batch = rows * a.w.scales_row;
  a.w.block_rows = block_rows;
  a.w.block_columns = block_columns;
}

}  // namespace

QuantizedArgument quantized_argument(const char* op, const char* name, c10::string_view format, const at::Tensor& codes,
                                     const at::Tensor& scales, const std::optional<at::Tensor>& global_scale, int64_t k,
                                     int64_t block, int64_t dim) {
  QuantizedArgument a{};
  a.w.format = format_of(op, format);
  const bool fp8 = a.w.format == WeightFormat::kFp8;
  const at::Tensor global = global_scale.value_or(at::Tensor());
  check_same_device(op, {{name, codes}, {"its scales", scales}, {"its global_scale", global}});
  QUARTZ_CHECK_ARGUMENT(codes.dim() == dim, op, name, (dim == 2 ? "be a matrix" : "be a stack of matrices"),
                        codes.sizes());
  QUARTZ_CHECK_ARGUMENT(codes.scalar_type() == (fp8 ? at::kFloat8_e4m3fn : at::kByte), op, name,
                        (fp8 ? "be float8_e4m3fn for format 'fp8'" : "be uint8, two codes a byte"),
                        codes.scalar_type());
  QUARTZ_CHECK_ARGUMENT(
      codes.size(-1) == (fp8 ? k : blocks_of(k, 2)), op, name,
      (fp8 ? "have a column for each column of its input" : "have a byte for two columns of its input"), codes.sizes(),
      " for ", k, " columns");
  const bool dense = codes.stride(-1) == 1 || codes.size(-1) <= 1;
  a.codes = dense ? codes : codes.contiguous();
  a.batch = dim == 3 ? codes.size(0) : 1;
  a.n = codes.size(-2);
  a.k = k;
  a.w.codes = static_cast<const uint8_t*>(a.codes.const_data_ptr());
  a.w.codes_row = a.codes.stride(-2);
  a.w.codes_batch = dim == 3 ? a.codes.stride(0) : 0;

  auto expected = codes.sizes().vec();
  if (fp8) {
    QUARTZ_CHECK_ARGUMENT(block >= 1, op, "block", "be positive", block);
    QUARTZ_CHECK_ARGUMENT(!global.defined(), op, "global_scale", "be None for format 'fp8'", global.sizes());
    QUARTZ_CHECK_ARGUMENT(scales.scalar_type() == at::kFloat, op, "the scales of 'fp8'", "be float32",
                          scales.scalar_type());
    if (take_outer(a, scales)) return a;
    expected.back() = blocks_of(k, block);
    if (scales.sizes() == c10::IntArrayRef(expected)) {
      take_inner(a, scales, a.n, 1, block);
      return a;
    }
    expected[expected.size() - 2] = blocks_of(a.n, block);
    QUARTZ_CHECK_ARGUMENT(scales.sizes() == c10::IntArrayRef(expected), op, "the scales of 'fp8'",
                          "be one number, one a matrix or a row, or one for each group or block of 'block' elements",
                          scales.sizes(), " for ", codes.sizes(), " and block ", block);
    take_inner(a, scales, blocks_of(a.n, block), block, block);
    return a;
  }

  const bool nv = a.w.format == WeightFormat::kNvFp4;
  const auto type = nv ? at::kFloat8_e4m3fn : at::kFloat8_e8m0fnu;
  QUARTZ_CHECK_ARGUMENT(scales.scalar_type() == type || scales.scalar_type() == at::kByte, op,
                        (nv ? "the scales of 'nvfp4'" : "the scales of 'mxfp4'"),
                        (nv ? "be float8_e4m3fn or its bytes" : "be float8_e8m0fnu or its bytes"),
                        scales.scalar_type());
  const int64_t group = nv ? 16 : 32;
  expected.back() = blocks_of(k, group);
  QUARTZ_CHECK_ARGUMENT(scales.sizes() == c10::IntArrayRef(expected), op,
                        (nv ? "the scales of 'nvfp4'" : "the scales of 'mxfp4'"),
                        (nv ? "be one for each 16 elements of a row" : "be one for each 32 elements of a row"),
                        scales.sizes(), " for ", codes.sizes(), " and ", k, " columns");
  take_inner(a, scales, a.n, 1, group);
  if (global.defined()) {
    QUARTZ_CHECK_ARGUMENT(global.scalar_type() == at::kFloat, op, "global_scale", "be float32", global.scalar_type());
    QUARTZ_CHECK_ARGUMENT(take_outer(a, global), op, "global_scale", "be one number, one a matrix or one a row",
                          global.sizes(), " for ", codes.sizes());
  }
  return a;
}

at::Tensor decoded_on_gpu([[maybe_unused]] const QuantizedArgument& weight, [[maybe_unused]] at::ScalarType dtype,
                          [[maybe_unused]] int64_t begin, [[maybe_unused]] int64_t end) {
#if QUARTZ_WITH_CUDA
  // Blocks of scales begin at row 0, so the cut falls between them or into none.
  TORCH_INTERNAL_ASSERT(begin % weight.w.block_rows == 0);
  auto w = weight.w;
  w.codes += begin * w.codes_row;
  const int64_t scales_at = begin / w.block_rows * w.scales_row * (w.format == WeightFormat::kFp8 ? 4 : 1);
  if (w.scales != nullptr) w.scales = static_cast<const char*>(w.scales) + scales_at;
  const auto out = at::empty({weight.batch, end - begin, weight.k}, weight.codes.options().dtype(dtype));
  kernels::cuda::decode_weight(w, weight.batch, end - begin, weight.k, kernel_dtype(out), out.mutable_data_ptr(),
                               current_gpu_stream(out));
  return out;
#else
  TORCH_INTERNAL_ASSERT(false, "built without CUDA");
#endif
}

}  // namespace quartz
