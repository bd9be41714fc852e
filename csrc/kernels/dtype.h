// The element types of the kernels and their conversions to and from float, in the same bits on every processor.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define QUARTZ_HD __host__ __device__ __forceinline__
#else
// Always inlined: a copy out of line, compiled for AVX-512 in one file, could replace that of another file in the link.
#define QUARTZ_HD inline __attribute__((always_inline))
#endif

namespace quartz::kernels {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16 };

constexpr int64_t size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

QUARTZ_HD float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
QUARTZ_HD uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Storage types: the bits of a bfloat16 or a float16, distinct so that overloads can tell them apart.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

QUARTZ_HD float to_float(float value) { return value; }
QUARTZ_HD float to_float(BFloat16 value) { return float_of_bits(static_cast<uint32_t>(value.bits) << 16); }
// Exact, subnormal numbers too: the exponent is moved by a multiplication with a power of two.
QUARTZ_HD float to_float(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return float_of_bits(sign | rest | 0x70000000u);  // infinity, NaN
  return float_of_bits(sign | bits_of_float(float_of_bits(rest) * 0x1p+112f));
}

template <class T>
T from_float(float value);

// To the nearest, ties to even; NaN stays NaN (quiet, sign and upper payload kept).
template <>
QUARTZ_HD float from_float<float>(float value) {
  return value;
}
template <>
QUARTZ_HD BFloat16 from_float<BFloat16>(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
QUARTZ_HD Float16 from_float<Float16>(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7fffffffu;
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x1ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // 65520 and more: infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: a multiple of 2^-24, rounded by the addition of 2^-1 x 2^0
    const uint32_t rounded = bits_of_float(float_of_bits(magnitude) + 0.5f) - bits_of_float(0.5f);
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rebased = magnitude - 0x38000000u;  // exponent bias 127 -> 15
  return {static_cast<uint16_t>(sign | ((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13))};
}

}  // namespace quartz::kernels
