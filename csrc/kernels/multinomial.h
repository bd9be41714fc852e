// Draws of category indices from rows of probabilities that need not add up to 1. A row's draws are a function of
// (seed, offset, row, probabilities), in the same bits on host and CUDA, in two ways:
//   without replacement  a race: category j scores w_j / e_j with e_j = -log(1 - u_j) ~ Exp(1); the draws are the
//                        categories in descending order of the score, equal scores in ascending order of index.
//                        u_j comes from word j % 4 of block row * ceil(categories / 4) + j / 4, small ones from 23
//                        further bits (philox.h); the score is float32
//   with replacement     draw k takes the 64 bits r of words 2 (k % 2), 2 (k % 2) + 1 (the first is the upper half) of
//                        block row * ceil(samples / 2) + k / 2, and is the lowest j for which more than
//                        floor(r S / 2^64) lies in m_0 + ... + m_j; m_j = floor(w_j 2^39), S the sum of the row's m
// w_j is p_j divided by the power of two that is above the row's largest p and at most twice that, so masses are exact
// down to 2^-39 of the largest probability and their 64-bit sums have no order. Categories without probability are
// never drawn: with replacement those below 2^-39 of the largest count as such.
// What is no probability (below 0, NaN, infinite) counts as 0, and is reported in `flags`, like a row without
// probabilities, and one with fewer of them than draws without replacement; such draws are the lowest indices left.
#pragma once

#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/philox.h"
#include "kernels/random_fill.h"
#include "kernels/row_reduce.h"

namespace quartz::kernels {

enum MultinomialFlag : int32_t { kBadProbability = 1, kNoProbability = 2, kTooFewCategories = 4 };

constexpr int64_t kMaxCategories = int64_t{1} << 24;  // the sum of so many masses fits 64 bits

struct Multinomial {
  const void* probabilities;  // [rows, categories], contiguous; 1 to kMaxCategories categories
  RandomType type;            // not kBool
  int64_t rows, categories, samples;
  bool replacement;
  RandomSource source;
  int64_t* result;  // [rows, samples], contiguous
  int32_t* flags;   // one number, 0 before: bits of MultinomialFlag are set
  void* workspace;  // CUDA: multinomial_workspace() bytes
};

// Blocks of random words that a call uses up.
QUARTZ_HD int64_t multinomial_blocks(int64_t rows, int64_t categories, int64_t samples, bool replacement) {
  return rows * (replacement ? (samples + 1) / 2 : (categories + 3) / 4);
}

QUARTZ_HD double probability_of(float value) { return static_cast<double>(value); }
QUARTZ_HD double probability_of(double value) { return value; }
QUARTZ_HD double probability_of(Float16 value) { return static_cast<double>(to_float(value)); }
QUARTZ_HD double probability_of(BFloat16 value) { return static_cast<double>(to_float(value)); }

QUARTZ_HD bool is_probability(double p) { return p >= 0.0 && p <= 0x1.fffffffffffffp+1023; }

// w = p * first * second: two factors, since one may leave the range of the exponent.
struct WeightScale {
  double first, second;

  // `largest` is above 0.
  QUARTZ_HD explicit WeightScale(double largest) {
    const bool subnormal = largest < 0x1p-1022;
    const uint64_t bits = bits_of_double(subnormal ? largest * 0x1p+64 : largest);
    // largest * 2^power is in [1/2, 1).
    const int power = 1022 - static_cast<int>(bits >> 52) + (subnormal ? 64 : 0), half = power / 2;
    first = double_of_bits(static_cast<uint64_t>(half + 1023) << 52);
    second = double_of_bits(static_cast<uint64_t>(power - half + 1023) << 52);
  }
  QUARTZ_HD double weight(double p) const { return is_probability(p) ? p * first * second : 0.0; }
};

// The score of a category with a probability is at least 0.
QUARTZ_HD float race_score(double weight, float exponential) { return static_cast<float>(weight) / exponential; }
constexpr float kNoScore = -1.0f;

// Exp(1) from a word and, for small words, the word of the same place in the same block of the stream kRaces.
QUARTZ_HD float race_exponential(uint32_t word) {
  const float u = static_cast<float>(static_cast<int32_t>(word >> 1)) * 0x1p-31f;
  return minus_log_of_rest(u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f);
}
QUARTZ_HD float race_exponential(uint32_t word, uint32_t tail) {
  return minus_log_of_rest((static_cast<float>(static_cast<int32_t>(word)) + open_uniform(tail)) * 0x1p-32f);
}
QUARTZ_HD bool needs_tail(uint32_t word) { return word < TokenNoise::kTail; }

// Ascending order of these keys is the order of the draws.
QUARTZ_HD uint64_t race_key(float score, int64_t index) {
  return static_cast<uint64_t>(~ordered_bits(score)) << 32 | static_cast<uint32_t>(index);
}

QUARTZ_HD uint64_t multinomial_mass(double weight) { return static_cast<uint64_t>(weight * 0x1p+39); }

// floor(r S / 2^64) for the draw's 64 random bits r.
QUARTZ_HD uint64_t multinomial_target(const PhiloxWords& words, int64_t draw, uint64_t sum) {
  const bool odd = (draw & 1) != 0;
  const uint64_t random = wide_word(words.word[odd ? 2 : 0], words.word[odd ? 3 : 1]);
#ifdef __CUDA_ARCH__
  return __umul64hi(random, sum);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(random) * sum >> 64);
#endif
}

// The lowest index whose inclusive prefix sum is above the target, which is below the last one.
QUARTZ_HD int64_t multinomial_find(const uint64_t* prefix, int64_t categories, uint64_t target) {
  int64_t low = 0, high = categories - 1;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (prefix[middle] > target) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

QUARTZ_CPU_KERNEL(void, multinomial, (const Multinomial& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
int64_t multinomial_workspace(const Multinomial& a);  // bytes
// With several draws without replacement only the scores of [rows, categories] are made, as float32 in the workspace:
// the result is the indices of the largest `samples` of them.
void multinomial(const Multinomial& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
