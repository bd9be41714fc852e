// The counter generator and what is built from it: known answers, bounds that the kernels rely on, accuracy.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>
#include <vector>

#include "kernels/multinomial.h"
#include "kernels/random_fill.h"
#include "kernels/sample.h"

namespace quartz::kernels {
namespace {

void expect_words(const PhiloxWords& got, std::initializer_list<uint32_t> want) {
  int i = 0;
  for (const uint32_t word : want) EXPECT_EQ(got.word[i++], word);
}

TEST(Philox, KnownAnswers) {  // of the authors' Random123
  expect_words(philox4x32(0, 0, 0, 0, 0, 0), {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u});
  const uint32_t ones = 0xffffffffu;
  expect_words(philox4x32(ones, ones, ones, ones, ones, ones), {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu});
  expect_words(philox4x32(0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u, 0xa4093822u, 0x299f31d0u),
               {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u});
}

TEST(Philox, SeedPositionSampleAndTokenAllMatter) {
  std::set<uint32_t> words;
  const auto first = [&](int64_t seed, int64_t position, int64_t sample, uint32_t group) {
    words.insert(TokenNoise(seed, position, sample).words(group).word[0]);
  };
  first(0, 0, 0, 0);
  first(1, 0, 0, 0);
  first(int64_t{1} << 32, 0, 0, 0);
  first(-1, 0, 0, 0);
  first(0, 1, 0, 0);
  first(0, 0, 1, 0);
  first(0, 0, 0, 1);
  EXPECT_EQ(words.size(), 7u);
}

// Words of every magnitude, the ends of the range and of the tail among them.
template <class Visit>
void for_words(const Visit& visit) {
  for (uint32_t word = 0; word < 4096; ++word) {
    visit(word);
    visit(~word);
    visit(TokenNoise::kTail - 2048 + word);
    for (int shift = 1; shift < 32; ++shift) visit((word << 20 | 0x9e375u) >> shift);
  }
}

TEST(Noise, UniformStaysInsideAndNoiseIsFinite) {
  const TokenNoise noise(3, 5, 0);
  for_words([&](uint32_t word) {
    const float u = noise.uniform(word & 1023, word), g = noise.gumbel(word & 1023, word);
    ASSERT_GT(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    ASSERT_GT(g, -2.9f);
    ASSERT_LT(g, 39.0f);
    ASSERT_GT(open_uniform(word), 0.0f);
    ASSERT_LT(open_uniform(word), 1.0f);
  });
}

TEST(Noise, IsAccurate) {
  const TokenNoise noise(3, 5, 0);
  for_words([&](uint32_t word) {
    const double u = noise.uniform(7, word), want = -std::log(-std::log1p(-u));
    ASSERT_NEAR(noise.gumbel(7, word), want, 3e-7 * (1 + std::abs(want))) << word;
  });
}

TEST(Noise, IsNeverAboveItsBound) {  // else the draw would pass over the winner
  const TokenNoise noise(3, 5, 0);
  for_words([&](uint32_t word) { ASSERT_LE(noise.gumbel(7, word), TokenNoise::gumbel_bound(word)) << word; });
}

TEST(Mass, IsExpCutOff) {
  EXPECT_EQ(mass_of(0.0f), uint64_t{1} << 40);
  EXPECT_EQ(mass_of(kMinusInfinity), 0u);
  EXPECT_EQ(mass_of(kMasslessBelow), 0u);
  for (float z = 0.0f; z > -30.0f; z -= 0.00037f) {
    const double want = std::exp(static_cast<double>(z)) * 0x1p+40;
    ASSERT_NEAR(static_cast<double>(mass_of(z)), want, 1.2e-7 * want + 1) << z;
  }
}

TEST(Mass, TheFirstTokenAlwaysStays) {
  EXPECT_EQ(mass_limit(0.0f, uint64_t{1} << 40), 1u);
  EXPECT_EQ(mass_limit(1e-30f, uint64_t{1} << 40), 1u);
  EXPECT_LE(mass_limit(0x1.fffffep-1f, (uint64_t{1} << 63) + 12345), (uint64_t{1} << 63) + 12345);
}

TEST(Values, AreOrderedLikeFloats) {
  const float values[] = {kMinusInfinity, -kLargest, -1.0f, -1e-45f, 0.0f, 1e-45f, 1.0f, kLargest};
  for (size_t i = 0; i + 1 < std::size(values); ++i) EXPECT_LT(order_of(values[i]), order_of(values[i + 1]));
  for (const float value : values) EXPECT_EQ(float_of_order(order_of(value)), value);
}

TEST(Values, LowestValueIsTheLimit) {
  for (const float largest : {0.0f, 17.25f, -3e4f, 1e8f, 3e38f}) {
    for (const float inverse : {1.0f, 0.1f, 30.0f, 1e12f}) {
      for (const float z : {-0.5f, -3.0f, -28.0f}) {
        const float low = lowest_value(largest, inverse, z);
        EXPECT_GE(scaled(low, largest, inverse), z);
        if (low > -kLargest) {
          EXPECT_LT(scaled(float_of_order(order_of(low) - 1), largest, inverse), z);
        }
      }
    }
  }
}

TEST(Values, Sanitized) {
  EXPECT_EQ(sanitized(NAN), kMinusInfinity);
  EXPECT_EQ(sanitized(INFINITY), kLargest);
  EXPECT_EQ(bits_of_float(sanitized(-0.0f)), 0u);
}

TEST(Fill, SineAndCosineAreAccurate) {
  for (uint32_t turn = 0; turn < (1u << 24); turn += 61) {
    float sine, cosine;
    sine_cosine(turn << 8 | 0x5au, &sine, &cosine);
    const double angle = 2 * M_PI * turn * 0x1p-24;
    ASSERT_NEAR(sine, std::sin(angle), 1.2e-7);
    ASSERT_NEAR(cosine, std::cos(angle), 1.2e-7);
  }
}

TEST(Fill, WideFunctionsAreAccurate) {
  for (uint64_t i = 0; i < 200000; ++i) {
    const PhiloxWords words = RandomSource{1, i, nullptr, nullptr, 0}.block(0);
    const uint64_t word = wide_word(words.word[0], words.word[1]) >> (i % 64);  // every magnitude
    const double v = (static_cast<double>(word >> 12) + 0.5) * 0x1p-52, log = -std::log(v);
    ASSERT_NEAR(wide_exponential_of(word), log, 2.3e-16 * (1 + log)) << word;
    double sine, cosine;
    wide_sine_cosine(word, &sine, &cosine);
    const double angle = 2 * M_PI * (static_cast<double>(word >> 11) * 0x1p-53);
    ASSERT_NEAR(sine, std::sin(angle), 1e-15);
    ASSERT_NEAR(cosine, std::cos(angle), 1e-15);
  }
}

TEST(Multinomial, WeightsAreExactPowersApart) {
  for (const double largest : {1.0, 0.75, 0x1p-149, 0x1.fffffep+127, 0x1p-1074, 0x1.8p-1030, 0x1.fffffffffffffp+1023}) {
    const WeightScale scale(largest);
    const double weight = scale.weight(largest);
    EXPECT_GE(weight, 0.5) << largest;
    EXPECT_LT(weight, 1.0) << largest;
    int exponent;
    EXPECT_EQ(weight, std::frexp(largest, &exponent)) << largest;
    EXPECT_EQ(scale.weight(-largest), 0.0);
  }
  EXPECT_EQ(WeightScale(1.0).weight(NAN), 0.0);
  EXPECT_EQ(WeightScale(1.0).weight(INFINITY), 0.0);
}

TEST(Fill, InstructionSetsAgree) {
  if (isa() == Isa::kAvx2) return;
  std::vector<float> first(1003), second(1003);
  for (const auto distribution :
       {Distribution::kUniform, Distribution::kNormal, Distribution::kExponential, Distribution::kBernoulli}) {
    RandomFill fill{};
    fill.count = 1003;
    fill.type = RandomType::kFloat32;
    fill.distribution = distribution;
    fill.source.seed = 7;
    fill.source.offset = 9;
    fill.first = 0.4;
    fill.second = 1.5;
    fill.result = first.data();
    cpu_avx2::random_fill(fill, serial());
    fill.result = second.data();
    cpu_avx512::random_fill(fill, serial());
    EXPECT_EQ(memcmp(first.data(), second.data(), sizeof(float) * first.size()), 0);
  }
}

}  // namespace
}  // namespace quartz::kernels
