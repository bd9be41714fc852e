// Random numbers into contiguous memory: element i is a function of (seed, offset, i) alone, in the same bits on host
// and CUDA. The blocks of a RandomSource (philox.h) give four words each; neighbours share a block:
//   4 elements of every type but float64, so that n elements use ceil(n / 4) offsets; probabilities always do
//   2 elements of float64, so that n elements use ceil(n / 2) offsets
// Distributions, computed in float32 (float64 for float64) and rounded once:
//   uniform      first + u (second - first), u a multiple of 2^-24 (float16: 2^-11, bfloat16: 2^-8, float64: 2^-53) in
//                [0, 1); what rounds to `second` becomes `first`
//   normal       first + second * z, z by Box and Muller from two words each (float64: four): |z| < 6.67 (8.58)
//   exponential  -log(v) / first, v in (0, 1): never 0
//   bernoulli    1 where the word is below p * 2^32, else 0; p is `first`, or element i of `probabilities`
#pragma once

#include <type_traits>

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/philox.h"
#include "kernels/random_wide.h"

namespace quartz::kernels {

enum class Distribution : uint8_t { kUniform, kNormal, kExponential, kBernoulli };
// kBool holds Bernoulli numbers only, a byte each.
enum class RandomType : uint8_t { kFloat32, kFloat16, kBFloat16, kFloat64, kBool };

// Calls `body` with a value of the C++ type (a byte for kBool).
template <class Body>
inline __attribute__((always_inline)) void with_random_type(RandomType type, const Body& body) {
  switch (type) {
    case RandomType::kFloat32:
      return body(float{});
    case RandomType::kFloat16:
      return body(Float16{});
    case RandomType::kBFloat16:
      return body(BFloat16{});
    case RandomType::kFloat64:
      return body(double{});
    default:
      return body(uint8_t{});
  }
}

// Calls `body` with the distribution as a constant.
template <class Body>
inline __attribute__((always_inline)) void with_distribution(Distribution distribution, const Body& body) {
  switch (distribution) {
    case Distribution::kUniform:
      return body(std::integral_constant<Distribution, Distribution::kUniform>{});
    case Distribution::kNormal:
      return body(std::integral_constant<Distribution, Distribution::kNormal>{});
    case Distribution::kExponential:
      return body(std::integral_constant<Distribution, Distribution::kExponential>{});
    default:
      return body(std::integral_constant<Distribution, Distribution::kBernoulli>{});
  }
}

struct RandomFill {
  void* result;
  int64_t count;
  RandomType type;
  Distribution distribution;
  RandomSource source;
  double first, second;
  const void* probabilities;  // null: `first` is the probability of all; else `count` of them
  bool wide_probabilities;    // float64 instead of float32
};

// Blocks that `count` elements use up.
QUARTZ_HD int64_t random_blocks(RandomType type, Distribution distribution, int64_t count) {
  const int64_t shared = type == RandomType::kFloat64 && distribution != Distribution::kBernoulli ? 2 : 4;
  return (count + shared - 1) / shared;
}

namespace random_constants {
constexpr float kTwoPi = 0x1.921fb6p+2f;
constexpr float kSin3 = -0x1.555556p-3f, kSin5 = 0x1.111112p-7f, kSin7 = -0x1.a01a02p-13f, kSin9 = 0x1.71de3ap-19f;
constexpr float kCos4 = 0x1.555556p-5f, kCos6 = -0x1.6c16c2p-10f, kCos8 = 0x1.a01a02p-16f, kCos10 = -0x1.27e4fcp-22f;
}  // namespace random_constants

// Sine and cosine of 2 pi times the upper 24 bits of a word: the quarter is exact, the rest within an eighth of a turn.
QUARTZ_HD void sine_cosine(uint32_t word, float* sine, float* cosine) {
  using namespace random_constants;
  const auto turn = static_cast<int32_t>(word >> 8), quarter = (turn + (1 << 21)) >> 22;
  const float angle = static_cast<float>(turn - (quarter << 22)) * 0x1p-24f * kTwoPi, square = product(angle, angle);
  float s = fmaf(kSin9, square, kSin7), c = fmaf(kCos10, square, kCos8);
  s = fmaf(s, square, kSin5);
  s = fmaf(s, square, kSin3);
  s = fmaf(product(s, square), angle, angle);
  c = fmaf(c, square, kCos6);
  c = fmaf(c, square, kCos4);
  c = fmaf(product(c, square), square, fmaf(-0.5f, square, 1.0f));
  const bool odd = (quarter & 1) != 0;
  const float a = odd ? c : s, b = odd ? s : c;
  *sine = (quarter & 2) != 0 ? -a : a;
  *cosine = ((quarter + 1) & 2) != 0 ? -b : b;
}

// -log of the word as a number in (0, 1).
QUARTZ_HD float exponential_of(uint32_t word) {
  const float v = (static_cast<float>(static_cast<int32_t>(word >> 1)) + 0.5f) * 0x1p-31f;
  return -log_of_normal(v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f);
}

// The words that stand for 1: with probability p, in steps of 2^-32, rounded down. NaN counts as 0.
struct BernoulliWords {
  uint32_t below;
  bool all;

  QUARTZ_HD explicit BernoulliWords(double p)
      : below(p > 0.0 && p < 1.0 ? static_cast<uint32_t>(p * 0x1p+32) : 0), all(p >= 1.0) {}
  QUARTZ_HD bool has(uint32_t word) const { return (word < below) | all; }
};

// What the elements share.
struct FillParameters {
  float first, second;
  double wide_first, wide_second;
  BernoulliWords ones;
  int bits;

  QUARTZ_HD explicit FillParameters(const RandomFill& a)
      : first(static_cast<float>(a.first)),
        second(static_cast<float>(a.second)),
        wide_first(a.first),
        wide_second(a.second),
        ones(a.first),
        bits(a.type == RandomType::kFloat32   ? 24
             : a.type == RandomType::kFloat16 ? 11
                                              : 8) {}
};

// An element before it is rounded to the type of the result; of normal numbers a pair.
template <Distribution kDistribution>
QUARTZ_HD float random_one(uint32_t word, const FillParameters& p) {
  if constexpr (kDistribution == Distribution::kUniform) {
    const float unit = p.bits == 24 ? 0x1p-24f : p.bits == 11 ? 0x1p-11f : 0x1p-8f;
    return fmaf(static_cast<float>(static_cast<int32_t>(word >> (32 - p.bits))) * unit, p.second - p.first, p.first);
  } else if constexpr (kDistribution == Distribution::kExponential) {
    return exponential_of(word) / p.first;
  } else {
    return p.ones.has(word) ? 1.0f : 0.0f;
  }
}
QUARTZ_HD void normal_pair(uint32_t first, uint32_t second, const FillParameters& p, float* x, float* y) {
  const float radius = sqrtf(2.0f * exponential_of(first));
  float sine, cosine;
  sine_cosine(second, &sine, &cosine);
  *x = fmaf(product(radius, cosine), p.second, p.first);
  *y = fmaf(product(radius, sine), p.second, p.first);
}

// The two float64 elements of one block.
template <Distribution kDistribution>
QUARTZ_HD void random_two(const PhiloxWords& words, const FillParameters& p, double (&out)[2]) {
  const uint64_t pair[2] = {wide_word(words.word[0], words.word[1]), wide_word(words.word[2], words.word[3])};
  if constexpr (kDistribution == Distribution::kUniform) {
    for (int j = 0; j < 2; ++j) {
      const double u = static_cast<double>(static_cast<int64_t>(pair[j] >> 11)) * 0x1p-53;
      const double value = fma(u, p.wide_second - p.wide_first, p.wide_first);
      out[j] = value >= p.wide_second ? p.wide_first : value;
    }
  } else if constexpr (kDistribution == Distribution::kNormal) {
    const double radius = sqrt(2.0 * wide_exponential_of(pair[0]));
    double sine, cosine;
    wide_sine_cosine(pair[1], &sine, &cosine);
    out[0] = fma(product(radius, cosine), p.wide_second, p.wide_first);
    out[1] = fma(product(radius, sine), p.wide_second, p.wide_first);
  } else {
    for (int j = 0; j < 2; ++j) out[j] = wide_exponential_of(pair[j]) / p.wide_first;
  }
}

// An element in the type of the result.
template <class T>
QUARTZ_HD T random_element(const RandomFill& a, float value) {
  if constexpr (sizeof(T) == 1 || sizeof(T) == 8) {
    return static_cast<T>(value);  // 0 or 1
  } else {
    const T rounded = from_float<T>(value);
    if (a.distribution == Distribution::kUniform && to_float(rounded) >= static_cast<float>(a.second)) {
      return from_float<T>(static_cast<float>(a.first));
    }
    return rounded;
  }
}

// Element i of a fill with one probability an element, given its word.
QUARTZ_HD float bernoulli_of(const RandomFill& a, int64_t i, uint32_t word) {
  const double p = a.wide_probabilities ? static_cast<const double*>(a.probabilities)[i]
                                        : static_cast<double>(static_cast<const float*>(a.probabilities)[i]);
  return BernoulliWords(p).has(word) ? 1.0f : 0.0f;
}

QUARTZ_CPU_KERNEL(void, random_fill, (const RandomFill& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void random_fill(const RandomFill& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
