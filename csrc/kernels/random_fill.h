// Random numbers into contiguous memory: element i is a function of (seed, offset, i) alone, in the same bits on host
// and CUDA. Four neighbours share the Philox block with counter (offset + i / 4 in 64 bits, 0, 2) and the seed as key,
// so that n elements use ceil(n / 4) offsets.
//   uniform      first + u (second - first), u a multiple of 2^-24 (float16: 2^-11, bfloat16: 2^-8) in [0, 1); what
//   rounds to
//                `second` becomes `first`
//   normal       first + second * z, z by Box and Muller from two words each: |z| < 6.67
//   exponential  -log(v) / first, v in (0, 1): never 0
//   bernoulli    1 with probability `first`, else 0
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/philox.h"

namespace quartz::kernels {

enum class Distribution : uint8_t { kUniform, kNormal, kExponential, kBernoulli };

struct RandomFill {
  void* result;
  int64_t count;
  DType dtype;
  Distribution distribution;
  uint64_t seed, offset;
  double first, second;
};

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
  return -log_f32(v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f);
}

// The four elements of one block, before they are rounded to the type of the result. `bits` of a uniform number count.
template <Distribution kDistribution>
QUARTZ_HD void random_four(const PhiloxWords& words, float first, float second, uint32_t threshold, int bits,
                           float (&out)[4]) {
  if constexpr (kDistribution == Distribution::kUniform) {
    for (int j = 0; j < 4; ++j) {
      const float u = static_cast<float>(static_cast<int32_t>(words.word[j] >> (32 - bits))) * (bits == 24   ? 0x1p-24f
                                                                                                : bits == 11 ? 0x1p-11f
                                                                                                             : 0x1p-8f);
      out[j] = fmaf(u, second - first, first);
    }
  } else if constexpr (kDistribution == Distribution::kNormal) {
    for (int j = 0; j < 4; j += 2) {
      const float radius = sqrtf(2.0f * exponential_of(words.word[j]));
      float sine, cosine;
      sine_cosine(words.word[j + 1], &sine, &cosine);
      out[j] = fmaf(product(radius, cosine), second, first);
      out[j + 1] = fmaf(product(radius, sine), second, first);
    }
  } else if constexpr (kDistribution == Distribution::kExponential) {
    for (int j = 0; j < 4; ++j) out[j] = exponential_of(words.word[j]) / first;
  } else {
    // threshold 2^32 - 1 with a second of 1 stands for a probability of 1.
    for (int j = 0; j < 4; ++j) out[j] = second == 1.0f || words.word[j] < threshold ? 1.0f : 0.0f;
  }
}

QUARTZ_HD PhiloxWords random_block(const RandomFill& a, int64_t block) {
  const uint64_t counter = a.offset + static_cast<uint64_t>(block);
  return philox4x32(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0,
                    static_cast<uint32_t>(NoiseStream::kFills), static_cast<uint32_t>(a.seed),
                    static_cast<uint32_t>(a.seed >> 32));
}

// Element 4 block + j in the type of the result.
template <class T>
QUARTZ_HD T random_element(const RandomFill& a, float value) {
  const T rounded = from_float<T>(value);
  if (a.distribution == Distribution::kUniform && to_float(rounded) >= static_cast<float>(a.second)) {
    return from_float<T>(static_cast<float>(a.first));
  }
  return rounded;
}

QUARTZ_CPU_KERNEL(void, random_fill, (const RandomFill& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void random_fill(const RandomFill& a, void* stream);
}  // namespace cuda
#endif

// What random_four wants beside the words.
struct FillParameters {
  float first, second;
  uint32_t threshold;
  int bits;

  QUARTZ_HD explicit FillParameters(const RandomFill& a)
      : first(static_cast<float>(a.first)),
        second(static_cast<float>(a.second)),
        threshold(0),
        bits(a.dtype == DType::kFloat32   ? 24
             : a.dtype == DType::kFloat16 ? 11
                                          : 8) {
    if (a.distribution == Distribution::kBernoulli) {
      second = a.first >= 1.0 ? 1.0f : 0.0f;
      threshold = a.first > 0.0 && a.first < 1.0 ? static_cast<uint32_t>(a.first * 4294967296.0) : 0;
    }
  }
};

}  // namespace quartz::kernels
