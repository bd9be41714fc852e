#include "kernels/quantize.h"

#include <algorithm>

#include "kernels/quantize_block.h"

namespace quartz::kernels::cpu {
namespace {

int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

}  // namespace

void quantize_fp8(const QuantizeFp8& a, const Parallel& parallel) {
  const int64_t across = blocks_of(a.columns, a.block_columns);
  parallel.run(blocks_of(a.rows, a.block_rows) * across, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      const int64_t row = block / across * a.block_rows, column = block % across * a.block_columns;
      const int64_t row_end = std::min(row + a.block_rows, a.rows);
      const int64_t column_end = std::min(column + a.block_columns, a.columns);
      float largest = 0.0f;
      for (int64_t r = row; r < row_end; ++r) {
        for (int64_t c = column; c < column_end; ++c) {
          largest = larger_magnitude(largest, element(a.w, r * a.stride + c, a.dtype));
        }
      }
      const float scale = fp8_scale(largest);
      a.scales[block] = scale;
      for (int64_t r = row; r < row_end; ++r) {
        for (int64_t c = column; c < column_end; ++c) {
          a.codes[r * a.columns + c] = float_to_e4m3(element(a.w, r * a.stride + c, a.dtype) / scale);
        }
      }
    }
  });
}

void dequantize_fp8(const DequantizeFp8& a, const Parallel& parallel) {
  const int64_t across = blocks_of(a.columns, a.block_columns);
  parallel.run(a.rows, std::max<int64_t>(1, 4096 / std::max<int64_t>(1, a.columns)), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      for (int64_t c = 0; c < a.columns; ++c) {
        const float scale = a.scales[r / a.block_rows * across + c / a.block_columns];
        put(a.w, r * a.columns + c, a.dtype, e4m3_to_float(a.codes[r * a.columns + c]) * scale);
      }
    }
  });
}

void quantize_fp4(const QuantizeFp4& a, const Parallel& parallel) {
  const int64_t groups = blocks_of(a.columns, group_of(a.format));
  parallel.run(a.rows * groups, 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) quantize_fp4_group(a, i / groups, i % groups);
  });
}

void dequantize_fp4(const DequantizeFp4& a, const Parallel& parallel) {
  const int64_t groups = blocks_of(a.columns, group_of(a.format));
  parallel.run(a.rows * groups, 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) dequantize_fp4_group(a, i / groups, i % groups);
  });
}

}  // namespace quartz::kernels::cpu
