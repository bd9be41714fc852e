#include "kernels/random_fill.h"

#include <algorithm>

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T, Distribution kDistribution>
void blocks(const RandomFill& a, int64_t begin, int64_t end) {
  const FillParameters parameters(a);
  T* result = static_cast<T*>(a.result);
  constexpr int kGroup = 16;  // blocks at a time: loops that the compiler turns into vectors
  for (int64_t block = begin; block < end; block += kGroup) {
    PhiloxWords words[kGroup];
    float values[kGroup][4];
    for (int i = 0; i < kGroup; ++i) words[i] = random_block(a, block + i);
    for (int i = 0; i < kGroup; ++i) {
      random_four<kDistribution>(words[i], parameters.first, parameters.second, parameters.threshold, parameters.bits,
                                 values[i]);
    }
    const int64_t count = std::min<int64_t>(4 * std::min<int64_t>(kGroup, end - block), a.count - 4 * block);
    for (int64_t i = 0; i < count; ++i) result[4 * block + i] = random_element<T>(a, values[i / 4][i % 4]);
  }
}

template <class T>
void typed(const RandomFill& a, int64_t begin, int64_t end) {
  switch (a.distribution) {
    case Distribution::kUniform:
      return blocks<T, Distribution::kUniform>(a, begin, end);
    case Distribution::kNormal:
      return blocks<T, Distribution::kNormal>(a, begin, end);
    case Distribution::kExponential:
      return blocks<T, Distribution::kExponential>(a, begin, end);
    default:
      return blocks<T, Distribution::kBernoulli>(a, begin, end);
  }
}

}  // namespace

void random_fill(const RandomFill& a, const Parallel& parallel) {
  parallel.run((a.count + 3) / 4, 4096, [&](int64_t begin, int64_t end) {
    switch (a.dtype) {
      case DType::kFloat32:
        return typed<float>(a, begin, end);
      case DType::kFloat16:
        return typed<Float16>(a, begin, end);
      default:
        return typed<BFloat16>(a, begin, end);
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
