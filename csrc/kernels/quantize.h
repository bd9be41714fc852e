// Quantised weights and back: float8 e4m3 with a scale a tensor, a row, a group of a row or a 128 x 128 block; NVFP4
// and MXFP4 with a scale a 16 or 32 elements of a row. Codes and scales are functions of the elements they cover alone.
//
//   fp8     scale = largest magnitude / 448 (1 for zeros), code = e4m3(w / scale)
//   NVFP4   scale = e4m3(largest / 6 / global), raised to 2^-9 where it would vanish, 0 for zeros;
//           code = e2m1(w / (scale * global)); value = (code * scale) * global, the product in brackets exact in bf16
//   MXFP4   scale = 2^(floor(log2(largest)) - 2), code = e2m1(w / scale); value = code * scale, exact in bf16
//
// Elements of NaN do not count for a largest magnitude. A row's last group may be shorter; two codes share a byte, the
// first in the low half, and a last half without element is 0.
#pragma once

#include "kernels/dtype.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

// rows x columns elements of `dtype`, row-major, `stride` elements apart. A scale covers `block_rows` x
// `block_columns`.
struct QuantizeFp8 {
  const void* w;
  uint8_t* codes;  // [rows, columns]
  float* scales;   // [ceil(rows / block_rows), ceil(columns / block_columns)]
  int64_t rows, columns, stride, block_rows, block_columns;
  DType dtype;
};

struct DequantizeFp8 {
  const uint8_t* codes;
  const float* scales;
  void* w;  // [rows, columns] of `dtype`: code * scale, one rounding
  int64_t rows, columns, block_rows, block_columns;
  DType dtype;
};

enum class Fp4 : uint8_t { kNv, kMx };
QUARTZ_HD constexpr int64_t group_of(Fp4 format) { return format == Fp4::kNv ? 16 : 32; }

struct QuantizeFp4 {
  const void* w;
  uint8_t* packed;      // [rows, ceil(columns / 2)]
  uint8_t* scales;      // [rows, ceil(columns / group)], e4m3 or e8m0
  const float* global;  // NVFP4: one number
  int64_t rows, columns, stride;
  Fp4 format;
  DType dtype;
};

struct DequantizeFp4 {
  const uint8_t* packed;
  const uint8_t* scales;
  const float* global;  // or null: the values without it, exact in bfloat16
  void* w;              // [rows, columns] of `dtype`
  int64_t rows, columns;
  Fp4 format;
  DType dtype;
};

namespace cpu {
void quantize_fp8(const QuantizeFp8& a, const Parallel& parallel);
void dequantize_fp8(const DequantizeFp8& a, const Parallel& parallel);
void quantize_fp4(const QuantizeFp4& a, const Parallel& parallel);
void dequantize_fp4(const DequantizeFp4& a, const Parallel& parallel);
}  // namespace cpu

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void quantize_fp8(const QuantizeFp8& a, void* stream);
void dequantize_fp8(const DequantizeFp8& a, void* stream);
void quantize_fp4(const QuantizeFp4& a, void* stream);
void dequantize_fp4(const DequantizeFp4& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
