// The small floating-point formats of quantised checkpoints, in the same bits on host and CUDA.
//
//   e4m3 (float8_e4m3fn): sign, 4 exponent bits of bias 7, 3 mantissa bits; largest 448, no infinity, NaN is 0x7f, 0xff
//   e2m1 (fp4): sign, 2 exponent bits of bias 1, 1 mantissa bit; 0, 0.5, 1, 1.5, 2, 3, 4, 6
//   e8m0: a power of two, 2^(byte - 127); 255 is NaN
#pragma once

#include "kernels/dtype.h"

namespace quartz::kernels {

constexpr float kLargestE4M3 = 448.0f, kLargestE2M1 = 6.0f;

QUARTZ_HD float e4m3_to_float(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80u) << 24, magnitude = byte & 0x7fu;
  if (magnitude == 0x7fu) return float_of_bits(sign | 0x7fc00000u);
  // Exponent and mantissa moved to their places give the value times 2^-120; the product is exact.
  return float_of_bits(sign | bits_of_float(float_of_bits(magnitude << 20) * 0x1p+120f));
}

// To the nearest, ties to even; beyond 448 the largest number; NaN stays NaN.
QUARTZ_HD uint8_t float_to_e4m3(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  if (magnitude > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7eu);  // 448 and more
  if (magnitude < 0x3c800000u) {  // below 2^-6: a multiple of 2^-9, rounded by the addition of 2^14
    const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0x1p+14f) - bits_of_float(0x1p+14f);
    return static_cast<uint8_t>(sign | rounded);
  }
  const uint32_t rebased = magnitude - 0x3c000000u;  // exponent bias 127 -> 7
  const uint32_t rounded = (rebased + 0x7ffffu + ((rebased >> 20) & 1u)) >> 20;
  return static_cast<uint8_t>(sign | (rounded > 0x7eu ? 0x7eu : rounded));
}

QUARTZ_HD float e2m1_to_float(uint32_t nibble) {
  const uint32_t sign = (nibble & 8u) << 28, magnitude = nibble & 7u;
  // 0 and 0.5, then 2^(e - 1) (1 + m / 2)
  const float value = magnitude < 2u ? 0.5f * static_cast<float>(magnitude)
                                     : float_of_bits((((magnitude >> 1) + 126u) << 23) | ((magnitude & 1u) << 22));
  return float_of_bits(sign | bits_of_float(value));
}

// To the nearest, ties to the even mantissa; beyond 6 the largest. NaN has no code: it becomes 0.
QUARTZ_HD uint32_t float_to_e2m1(float value) {
  const float magnitude = value < 0.0f ? -value : value;
  const uint32_t sign = value < 0.0f ? 8u : 0u;
  uint32_t code = 0;
  if (magnitude > 5.0f) {
    code = 7;
  } else if (magnitude >= 3.5f) {
    code = 6;
  } else if (magnitude > 2.5f) {
    code = 5;
  } else if (magnitude >= 1.75f) {
    code = 4;
  } else if (magnitude > 1.25f) {
    code = 3;
  } else if (magnitude >= 0.75f) {
    code = 2;
  } else if (magnitude > 0.25f) {
    code = 1;
  }
  return code == 0 ? 0u : sign | code;
}

QUARTZ_HD float e8m0_to_float(uint8_t byte) {
  if (byte == 255u) return float_of_bits(0x7fc00000u);
  return byte == 0u ? float_of_bits(0x00400000u)
                    : float_of_bits(static_cast<uint32_t>(byte) << 23);  // 2^-127: subnormal
}

// The exponent of the OCP microscaling format: floor(log2(largest)) - 2, so that the largest lies in [4, 8) steps.
QUARTZ_HD uint8_t e8m0_of_largest(float largest) {
  const int exponent = static_cast<int>(bits_of_float(largest) >> 23);  // biased; 0 for zero and subnormal numbers
  return static_cast<uint8_t>(exponent < 2 ? 0 : exponent - 2);
}

}  // namespace quartz::kernels
