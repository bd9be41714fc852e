// One block of a quantised tensor: the arithmetic that quantize.cpp and cuda/quantize.cu share.
#pragma once

#include "kernels/low_precision.h"
#include "kernels/quantize.h"

namespace quartz::kernels {

QUARTZ_HD float element(const void* w, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(w)[index];
  if (dtype == DType::kFloat16) return to_float(static_cast<const Float16*>(w)[index]);
  return to_float(static_cast<const BFloat16*>(w)[index]);
}

QUARTZ_HD void put(void* w, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(w)[index] = value;
  } else if (dtype == DType::kFloat16) {
    static_cast<Float16*>(w)[index] = from_float<Float16>(value);
  } else {
    static_cast<BFloat16*>(w)[index] = from_float<BFloat16>(value);
  }
}

QUARTZ_HD float larger_magnitude(float largest, float value) {
  const float magnitude = value < 0.0f ? -value : value;
  return magnitude > largest ? magnitude : largest;  // false for NaN
}

QUARTZ_HD float fp8_scale(float largest) { return largest > 0.0f ? largest / kLargestE4M3 : 1.0f; }

QUARTZ_HD uint8_t nvfp4_scale(float largest, float global) {
  if (!(largest > 0.0f)) return 0;
  const uint8_t code = float_to_e4m3(largest / kLargestE2M1 / global);
  return code == 0 ? uint8_t{1} : code;
}

// What a code is multiplied with, without the global scale.
QUARTZ_HD float fp4_scale_value(uint8_t scale, Fp4 format) {
  return format == Fp4::kNv ? e4m3_to_float(scale) : e8m0_to_float(scale);
}

// Group `group` of row `row`: its scale and its codes.
QUARTZ_HD void quantize_fp4_group(const QuantizeFp4& a, int64_t row, int64_t group) {
  const int64_t size = group_of(a.format), begin = group * size;
  const int64_t end = begin + size < a.columns ? begin + size : a.columns;
  const int64_t groups = (a.columns + size - 1) / size, bytes = (a.columns + 1) / 2;
  float largest = 0.0f;
  for (int64_t c = begin; c < end; ++c) largest = larger_magnitude(largest, element(a.w, row * a.stride + c, a.dtype));
  const float global = a.format == Fp4::kNv ? *a.global : 1.0f;
  const uint8_t scale = a.format == Fp4::kNv ? nvfp4_scale(largest, global) : e8m0_of_largest(largest);
  a.scales[row * groups + group] = scale;
  const float step = fp4_scale_value(scale, a.format) * global;
  for (int64_t c = begin; c < end; c += 2) {
    uint32_t pair = 0;
    for (int64_t i = 0; i < 2 && c + i < end; ++i) {
      const float value = element(a.w, row * a.stride + c + i, a.dtype);
      pair |= (step > 0.0f ? float_to_e2m1(value / step) : 0u) << (4 * i);
    }
    a.packed[row * bytes + c / 2] = static_cast<uint8_t>(pair);
  }
}

QUARTZ_HD void dequantize_fp4_group(const DequantizeFp4& a, int64_t row, int64_t group) {
  const int64_t size = group_of(a.format), begin = group * size;
  const int64_t end = begin + size < a.columns ? begin + size : a.columns;
  const int64_t groups = (a.columns + size - 1) / size, bytes = (a.columns + 1) / 2;
  const float scale = fp4_scale_value(a.scales[row * groups + group], a.format);
  for (int64_t c = begin; c < end; ++c) {
    const uint32_t code = (a.packed[row * bytes + c / 2] >> (4 * (c % 2))) & 15u;
    float value = e2m1_to_float(code) * scale;
    if (a.global != nullptr) value = value * *a.global;
    put(a.w, row * a.columns + c, a.dtype, value);
  }
}

}  // namespace quartz::kernels
