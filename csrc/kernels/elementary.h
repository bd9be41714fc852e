// exp and log of our own: polynomials with a fixed order of explicit fused multiply-adds, so that host and CUDA agree
// in every bit. Checked against double on all 2^32 inputs: exp within 0.997 ulp, log within 0.832 ulp (facts of the
// prototype; csrc/tests/test_elementary.cpp samples them). The vector forms are in cpu/simd.h.
#pragma once

#include <cmath>

#include "kernels/dtype.h"

namespace quartz::kernels {

// exp: x = n ln2 + r with |r| <= ln2 / 2, n by adding 1.5 * 2^23; exp(r) = 1 + r + r^2 (c2 + c3 r + ... + c7 r^5).
namespace exp_constants {
constexpr float kLog2E = 0x1.715476p+0f, kMagic = 12582912.0f;
constexpr float kLn2High = 0x1.62e4p-1f;  // 15 bits: n * kLn2High is exact for |n| < 512
constexpr float kLn2Low = 0x1.7f7d1cp-20f;
constexpr float kLowest = -104.0f, kHighest = 89.0f;  // beyond them the result is 0 or infinity
constexpr float kC2 = 0.5f, kC3 = 0x1.555554p-3f, kC4 = 0x1.55548ep-5f, kC5 = 0x1.111272p-7f, kC6 = 0x1.6d8d52p-10f,
                kC7 = 0x1.9f0884p-13f;
}  // namespace exp_constants

// log: x = 2^e (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); log(1 + f) = f - f^2 / 2 + f^3 (c3 + c4 f + ... + c11 f^8).
namespace log_constants {
constexpr uint32_t kSqrtHalf = 0x3f3504f3u;  // the bits of sqrt(1/2)
constexpr float kSmallestNormal = 0x1p-126f, kScale = 0x1p+23f;
constexpr float kC3 = 0x1.555548p-2f, kC4 = -0x1.000006p-2f, kC5 = 0x1.99a4b6p-3f, kC6 = -0x1.555c4ep-3f,
                kC7 = 0x1.23376cp-3f, kC8 = -0x1.fc2208p-4f, kC9 = 0x1.e6f03cp-4f, kC10 = -0x1.de3bf6p-4f,
                kC11 = 0x1.1457e4p-4f;
}  // namespace log_constants

constexpr uint32_t kQuietNan = 0x7fc00000u, kInfinity = 0x7f800000u;

QUARTZ_HD float exp_f32(float x) {
  using namespace exp_constants;
  float clamped = x < kLowest ? kLowest : x;
  clamped = clamped > kHighest ? kHighest : clamped;
  const float shifted = fmaf(clamped, kLog2E, kMagic), n = shifted - kMagic;
  float r = fmaf(n, -kLn2High, clamped);
  r = fmaf(n, -kLn2Low, r);
  float p = fmaf(kC7, r, kC6);
  p = fmaf(p, r, kC5);
  p = fmaf(p, r, kC4);
  p = fmaf(p, r, kC3);
  p = fmaf(p, r, kC2);
  p = fmaf(p * r, r, r) + 1.0f;
  // 2^n in two factors: a single one would leave the range of the exponent.
  const auto power = static_cast<int32_t>(bits_of_float(shifted) - bits_of_float(kMagic));
  const int32_t half = power >> 1;
  p = p * float_of_bits(static_cast<uint32_t>(half + 127) << 23);
  p = p * float_of_bits(static_cast<uint32_t>(power - half + 127) << 23);
  return x != x ? float_of_bits(kQuietNan) : p;
}

QUARTZ_HD float log_f32(float x) {
  using namespace log_constants;
  const bool subnormal = x < kSmallestNormal;
  const float y = subnormal ? x * kScale : x;
  const auto t = static_cast<int32_t>(bits_of_float(y) - kSqrtHalf);
  const auto e = static_cast<float>((t >> 23) - (subnormal ? 23 : 0));
  const float f = float_of_bits(static_cast<uint32_t>(t & 0x7fffff) + kSqrtHalf) - 1.0f;
  const float z = f * f;
  float p = fmaf(kC11, f, kC10);
  p = fmaf(p, f, kC9);
  p = fmaf(p, f, kC8);
  p = fmaf(p, f, kC7);
  p = fmaf(p, f, kC6);
  p = fmaf(p, f, kC5);
  p = fmaf(p, f, kC4);
  p = fmaf(p, f, kC3);
  float q = fmaf(f * z, p, e * exp_constants::kLn2Low);
  q = fmaf(-0.5f, z, q);
  q = q + f;
  q = fmaf(e, exp_constants::kLn2High, q);
  if (x == float_of_bits(kInfinity)) q = x;
  if (x == 0.0f) q = -float_of_bits(kInfinity);
  return x < 0.0f || x != x ? float_of_bits(kQuietNan) : q;
}

}  // namespace quartz::kernels
