#include "kernels/random_fill.h"

#include <algorithm>

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int kGroup = 16;  // blocks at a time: loops over their 64 words that the compiler turns into vectors

template <class T, Distribution kDistribution>
void blocks(const RandomFill& a, int64_t begin, int64_t end) {
  const FillParameters parameters(a);
  T* result = static_cast<T*>(a.result);
  for (int64_t block = begin; block < end; block += kGroup) {
    uint32_t words[4 * kGroup];
    float values[4 * kGroup];
    a.source.blocks<kGroup>(block, NoiseStream::kFills, words);
    const int64_t count = std::min<int64_t>(4 * std::min<int64_t>(kGroup, end - block), a.count - 4 * block);
    if (kDistribution == Distribution::kBernoulli && a.probabilities != nullptr) {
      for (int64_t i = 0; i < count; ++i) values[i] = bernoulli_of(a, 4 * block + i, words[i]);
    } else if constexpr (kDistribution == Distribution::kNormal) {
      for (int i = 0; i < 4 * kGroup; i += 2) {
        normal_pair(words[i], words[i + 1], parameters, &values[i], &values[i + 1]);
      }
    } else {
      for (int i = 0; i < 4 * kGroup; ++i) values[i] = random_one<kDistribution>(words[i], parameters);
    }
    T* out = result + 4 * block;
    if (count == 4 * kGroup) {
      for (int i = 0; i < 4 * kGroup; ++i) out[i] = random_element<T>(a, values[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = random_element<T>(a, values[i]);
    }
  }
}

template <Distribution kDistribution>
void wide_blocks(const RandomFill& a, int64_t begin, int64_t end) {
  const FillParameters parameters(a);
  auto* result = static_cast<double*>(a.result);
  for (int64_t block = begin; block < end; block += kGroup) {
    double values[kGroup][2];
    for (int i = 0; i < kGroup; ++i) random_two<kDistribution>(a.source.block(block + i), parameters, values[i]);
    const int64_t count = std::min<int64_t>(2 * std::min<int64_t>(kGroup, end - block), a.count - 2 * block);
    for (int64_t i = 0; i < count; ++i) result[2 * block + i] = values[i / 2][i % 2];
  }
}

}  // namespace

void random_fill(const RandomFill& a, const Parallel& parallel) {
  parallel.run(random_blocks(a.type, a.distribution, a.count), 4096, [&](int64_t begin, int64_t end) {
    with_random_type(a.type, [&](auto element) {
      using T = decltype(element);
      with_distribution(a.distribution, [&](auto constant) {
        constexpr Distribution kDistribution = decltype(constant)::value;
        constexpr bool kBernoulli = kDistribution == Distribution::kBernoulli;
        if constexpr (sizeof(T) == 8 && !kBernoulli) {
          wide_blocks<kDistribution>(a, begin, end);
        } else if constexpr (sizeof(T) > 1 || kBernoulli) {
          blocks<T, kDistribution>(a, begin, end);
        }
      });
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
