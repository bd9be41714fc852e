// Counter-based random numbers: Philox4x32-10 (Salmon et al., 2011) and the noise that sampling adds to logits. A
// number is a function of (seed, sample index, position, token id, stream) alone, in the same bits on host and CUDA.
#pragma once

#include "kernels/elementary.h"

namespace quartz::kernels {

struct PhiloxWords {
  uint32_t word[4];
};

namespace philox_constants {
constexpr uint32_t kMultiply0 = 0xd2511f53u, kMultiply1 = 0xcd9e8d57u;  // the constants of the paper
constexpr uint32_t kWeyl0 = 0x9e3779b9u, kWeyl1 = 0xbb67ae85u;
constexpr int kRounds = 10;
}  // namespace philox_constants

QUARTZ_HD PhiloxWords philox4x32(uint32_t counter0, uint32_t counter1, uint32_t counter2, uint32_t counter3,
                                 uint32_t key0, uint32_t key1) {
  using namespace philox_constants;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t first = static_cast<uint64_t>(kMultiply0) * counter0;
    const uint64_t second = static_cast<uint64_t>(kMultiply1) * counter2;
    counter0 = static_cast<uint32_t>(second >> 32) ^ counter1 ^ key0;
    counter2 = static_cast<uint32_t>(first >> 32) ^ counter3 ^ key1;
    counter1 = static_cast<uint32_t>(second);
    counter3 = static_cast<uint32_t>(first);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {{counter0, counter1, counter2, counter3}};
}

// Products that no compiler may fuse with a following sum.
QUARTZ_HD float product(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

QUARTZ_HD double product(double a, double b) {
#ifdef __CUDA_ARCH__
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

// In (0, 1), 23 bits: the smallest is 2^-24, the largest 1 - 2^-24.
QUARTZ_HD float open_uniform(uint32_t word) {
  return (static_cast<float>(static_cast<int32_t>(word >> 9)) + 0.5f) * 0x1p-23f;
}

// log(2^e (1 + f)) by the polynomial of log_f32.
QUARTZ_HD float log_of_parts(float e, float f) {
  using namespace log_constants;
  const float z = product(f, f);
  float p = fmaf(kC11, f, kC10);
  p = fmaf(p, f, kC9);
  p = fmaf(p, f, kC8);
  p = fmaf(p, f, kC7);
  p = fmaf(p, f, kC6);
  p = fmaf(p, f, kC5);
  p = fmaf(p, f, kC4);
  p = fmaf(p, f, kC3);
  float q = fmaf(product(f, z), p, product(e, exp_constants::kLn2Low));
  q = fmaf(-0.5f, z, q);
  q = q + f;
  return fmaf(e, exp_constants::kLn2High, q);
}

// log_f32 of a normal number above 0, in the same bits and without its branches.
QUARTZ_HD float log_of_normal(float x) {
  const auto t = static_cast<int32_t>(bits_of_float(x) - log_constants::kSqrtHalf);
  const float f = float_of_bits(static_cast<uint32_t>(t & 0x7fffff) + log_constants::kSqrtHalf) - 1.0f;
  return log_of_parts(static_cast<float>(t >> 23), f);
}

// -log(1 - u) for u in (0, 1 - 2^-24], exact to about an ulp for small u too: log_f32 with the fraction taken from u.
QUARTZ_HD float minus_log_of_rest(float u) {
  const auto t = static_cast<int32_t>(bits_of_float(1.0f - u) - log_constants::kSqrtHalf);
  const int32_t exponent = t >> 23;
  const float fraction = float_of_bits(static_cast<uint32_t>(t & 0x7fffff) + log_constants::kSqrtHalf) - 1.0f;
  return -log_of_parts(static_cast<float>(exponent), exponent == 0 ? -u : fraction);
}

// The streams of one (seed, sample index, position).
enum class NoiseStream : uint32_t {
  kTokens = 0,  // one word a token: counter (token id / 4, ...), word token id % 4
  kTails = 1,   // 23 further bits of a token whose first word is small, counter (token id, ...)
  kFills = 2,   // the draws of a generator (RandomSource)
  kRaces = 3,   // 23 further bits of the draws of multinomial.h whose first word is small
};

// The words of one draw of a generator: block `i` has counter (offset + i in 64 bits, 0, stream) and the seed as key.
// In a captured CUDA graph seed and offset change from replay to replay and stand in device memory; a third word of 1
// keeps those blocks apart from the generator's own.
struct RandomSource {
  uint64_t seed, offset;
  const int64_t *graph_seed, *graph_offset;  // null outside a capture; the second is added to `offset`
  uint32_t third;

  // With the values of this replay; to be called where the kernel runs.
  QUARTZ_HD RandomSource resolved() const {
    if (graph_seed == nullptr) return {seed, offset, nullptr, nullptr, 0};
    return {static_cast<uint64_t>(*graph_seed), offset + static_cast<uint64_t>(*graph_offset), nullptr, nullptr, 1};
  }
  // The words of N blocks, one block after the other: the compiler makes vectors of them.
  template <int N>
  QUARTZ_HD void blocks(int64_t first, NoiseStream stream, uint32_t (&out)[4 * N]) const {
    for (int i = 0; i < N; ++i) {
      const PhiloxWords words = block(first + i, stream);
      for (int j = 0; j < 4; ++j) out[4 * i + j] = words.word[j];
    }
  }
  QUARTZ_HD PhiloxWords block(int64_t index, NoiseStream stream = NoiseStream::kFills) const {
    const uint64_t counter = offset + static_cast<uint64_t>(index);
    return philox4x32(static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), third,
                      static_cast<uint32_t>(stream), static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  }
};

// The Gumbel noise of the tokens at one position. The 64 bits of the seed are the key; position, sample index and
// stream stand in the counter beside the token. Four tokens share one Philox block.
struct TokenNoise {
  uint32_t key0, key1, position, sample;

  // Words below it are extended by 23 bits, so that the largest noise is resolved to 2^-41 relative and better.
  static constexpr uint32_t kTail = 1u << 18;

  QUARTZ_HD TokenNoise(int64_t seed, int64_t position_, int64_t sample_index)
      : key0(static_cast<uint32_t>(static_cast<uint64_t>(seed))),
        key1(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)),
        position(static_cast<uint32_t>(position_)),
        sample(static_cast<uint32_t>(sample_index)) {}

  // The words of the tokens 4 group to 4 group + 3.
  QUARTZ_HD PhiloxWords words(uint32_t group) const {
    return philox4x32(group, position, sample, static_cast<uint32_t>(NoiseStream::kTokens), key0, key1);
  }

  // The token's uniform number in [2^-56, 1 - 2^-24].
  QUARTZ_HD float uniform(uint32_t token, uint32_t word) const {
    if (word >= kTail) {
      const float u = static_cast<float>(static_cast<int32_t>(word >> 1)) * 0x1p-31f;
      return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
    }
    const PhiloxWords tail =
        philox4x32(token, position, sample, static_cast<uint32_t>(NoiseStream::kTails), key0, key1);
    return (static_cast<float>(static_cast<int32_t>(word)) + open_uniform(tail.word[0])) * 0x1p-32f;
  }

  // -log(-log(1 - u)): between -2.82 and 38.9.
  QUARTZ_HD float gumbel(uint32_t token, uint32_t word) const {
    return -log_f32(minus_log_of_rest(uniform(token, word)));
  }
  QUARTZ_HD float gumbel(uint32_t token) const { return gumbel(token, words(token >> 2).word[token & 3]); }

  // No smaller than the noise of a token with this word, without logarithms; for small words no bound is known.
  QUARTZ_HD static float gumbel_bound(uint32_t word) {
    if (word < kTail) return float_of_bits(kInfinity);
#ifdef __CUDA_ARCH__
    const int zeros = __clz(static_cast<int>(word));
#else
    const int zeros = __builtin_clz(word);
#endif
    return fmaf(static_cast<float>(zeros + 1), 0x1.62e430p-1f, 1e-3f);
  }
};

}  // namespace quartz::kernels
