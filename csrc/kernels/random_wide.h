// The functions of random_fill.h in float64: series with a fixed order of explicit fused multiply-adds.
#pragma once

#include <cmath>

#include "kernels/philox.h"

namespace quartz::kernels {

QUARTZ_HD uint64_t wide_word(uint32_t high, uint32_t low) { return static_cast<uint64_t>(high) << 32 | low; }

QUARTZ_HD uint64_t bits_of_double(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
QUARTZ_HD double double_of_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

namespace wide_constants {
constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcdull;  // the bits of sqrt(1/2)
constexpr double kLn2High = 0x1.62e42fefa38p-1;        // 42 bits: times an exponent it is exact
constexpr double kLn2Low = 0x1.ef35793c7673p-45;
constexpr double kTwoPi = 0x1.921fb54442d18p+2;
}  // namespace wide_constants

// log of a normal number above 0. x = 2^e m with sqrt(1/2) <= m < sqrt(2), s = (m - 1) / (m + 1), |s| < 0.172:
// log(m) = 2 s (1 + s^2 / 3 + s^4 / 5 + ... + s^20 / 21); the next term is below 2^-59 of the first.
QUARTZ_HD double log_f64(double x) {
  using namespace wide_constants;
  const auto t = static_cast<int64_t>(bits_of_double(x) - kSqrtHalf);
  const auto e = static_cast<double>(t >> 52);
  const double f = double_of_bits(static_cast<uint64_t>(t & 0xfffffffffffffll) + kSqrtHalf) - 1.0;
  const double s = f / (2.0 + f), z = product(s, s);
  double p = 1.0 / 21;
  p = fma(p, z, 1.0 / 19);
  p = fma(p, z, 1.0 / 17);
  p = fma(p, z, 1.0 / 15);
  p = fma(p, z, 1.0 / 13);
  p = fma(p, z, 1.0 / 11);
  p = fma(p, z, 1.0 / 9);
  p = fma(p, z, 1.0 / 7);
  p = fma(p, z, 1.0 / 5);
  p = fma(p, z, 1.0 / 3);
  // 2 s = f - s f, and f is exact.
  const double rest = fma(product(2.0, s), product(p, z), fma(-s, f, product(e, kLn2Low)));
  return fma(e, kLn2High, f + rest);
}

// -log of the upper 52 bits of a word as a number in (0, 1).
QUARTZ_HD double wide_exponential_of(uint64_t word) {
  return -log_f64((static_cast<double>(static_cast<int64_t>(word >> 12)) + 0.5) * 0x1p-52);
}

// Sine and cosine of 2 pi times the upper 53 bits of a word, by their power series within an eighth of a turn.
QUARTZ_HD void wide_sine_cosine(uint64_t word, double* sine, double* cosine) {
  using namespace wide_constants;
  const auto turn = static_cast<int64_t>(word >> 11), quarter = (turn + (int64_t{1} << 50)) >> 51;
  const double angle = product(static_cast<double>(turn - (quarter << 51)) * 0x1p-53, kTwoPi);
  const double square = product(angle, angle);
  double s = 1.0 / 355687428096000.0, c = 1.0 / 20922789888000.0;  // 1 / 17!, 1 / 16!
  s = fma(s, square, -1.0 / 1307674368000.0);
  s = fma(s, square, 1.0 / 6227020800.0);
  s = fma(s, square, -1.0 / 39916800.0);
  s = fma(s, square, 1.0 / 362880.0);
  s = fma(s, square, -1.0 / 5040.0);
  s = fma(s, square, 1.0 / 120.0);
  s = fma(s, square, -1.0 / 6.0);
  s = fma(product(s, square), angle, angle);
  c = fma(c, square, -1.0 / 87178291200.0);
  c = fma(c, square, 1.0 / 479001600.0);
  c = fma(c, square, -1.0 / 3628800.0);
  c = fma(c, square, 1.0 / 40320.0);
  c = fma(c, square, -1.0 / 720.0);
  c = fma(c, square, 1.0 / 24.0);
  c = fma(product(c, square), square, fma(-0.5, square, 1.0));
  const bool odd = (quarter & 1) != 0;
  const double a = odd ? c : s, b = odd ? s : c;
  *sine = (quarter & 2) != 0 ? -a : a;
  *cosine = ((quarter + 1) & 2) != 0 ? -b : b;
}

}  // namespace quartz::kernels
