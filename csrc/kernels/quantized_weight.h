// A weight of a product as a checkpoint holds it: codes and scales, decoded where the product reads it.
//
//   W[n, k]    what the product multiplies: code * scale of its block, in float, rounded once to the type of x; the
//   code
//              itself where there are no scales. Exact in bfloat16 for NVFP4, MXFP4 and fp8 without block scales.
//   outer[n]   what a sum over k is multiplied with, in float: the scale of a tensor or of a row, NVFP4's global scale.
//
// So a product has the bits of the same product with W as a plain matrix, whose sums are then scaled. The formats and
// their codes are in low_precision.h. This describes a stack of matrices; one matrix has batch strides of 0.
#pragma once

#include "kernels/low_precision.h"

namespace quartz::kernels {

enum class WeightFormat : uint8_t {
  kPlain,  // not quantised
  kFp8,    // e4m3 codes, one a byte; float scales of blocks, or none
  kNvFp4,  // e2m1 codes, two a byte, the first in the low half; an e4m3 scale for 16 k of a row
  kMxFp4,  // the same codes; an e8m0 scale for 32 k of a row
};

struct QuantizedWeight {
  WeightFormat format = WeightFormat::kPlain;
  const uint8_t* codes = nullptr;             // those of a row adjacent
  int64_t codes_batch = 0, codes_row = 0;     // bytes
  const void* scales = nullptr;               // null: none (fp8 only); those of a row adjacent
  int64_t scales_batch = 0, scales_row = 0;   // elements
  int64_t block_rows = 1, block_columns = 1;  // what a scale covers; the last block of a row or column may be smaller
  const float* outer = nullptr;               // null: 1
  int64_t outer_batch = 0, outer_row = 0;     // elements; 0 where it is one number
};

// W[n, k] of a matrix of the stack, before it is rounded.
QUARTZ_HD float decoded(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k) {
  const uint8_t* codes = w.codes + batch * w.codes_batch + n * w.codes_row;
  const int64_t scale = batch * w.scales_batch + n / w.block_rows * w.scales_row + k / w.block_columns;
  if (w.format == WeightFormat::kFp8) {
    const float code = e4m3_to_float(codes[k]);
    return w.scales == nullptr ? code : code * static_cast<const float*>(w.scales)[scale];
  }
  const uint8_t byte = static_cast<const uint8_t*>(w.scales)[scale];
  const float code = e2m1_to_float((codes[k / 2] >> (4 * (k % 2))) & 15u);
  return code * (w.format == WeightFormat::kNvFp4 ? e4m3_to_float(byte) : e8m0_to_float(byte));
}

}  // namespace quartz::kernels
