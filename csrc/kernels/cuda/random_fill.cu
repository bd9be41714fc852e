// A thread a block of random words: four elements, two of float64.
#include "kernels/random_fill.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T, int N>
struct alignas(N * sizeof(T)) Neighbours {
  T value[N];
};

template <class T, Distribution kDistribution>
__global__ void __launch_bounds__(kThreads) random_fill_kernel(const RandomFill a, bool aligned) {
  constexpr bool kWide = sizeof(T) == 8 && kDistribution != Distribution::kBernoulli;
  constexpr int kShared = kWide ? 2 : 4;
  const FillParameters parameters(a);
  const RandomSource source = a.source.resolved();
  T* result = static_cast<T*>(a.result);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x; kShared * block < a.count; block += step) {
    const PhiloxWords words = source.block(block);
    const int64_t first = kShared * block;
    Neighbours<T, kShared> out;
    if constexpr (kWide) {
      random_two<kDistribution>(words, parameters, out.value);
    } else {
      float values[4];
      if (kDistribution == Distribution::kBernoulli && a.probabilities != nullptr) {
#pragma unroll
        for (int j = 0; j < 4; ++j) values[j] = first + j < a.count ? bernoulli_of(a, first + j, words.word[j]) : 0.0f;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (kDistribution == Distribution::kNormal) {
            if (j % 2 == 0) normal_pair(words.word[j], words.word[j + 1], parameters, &values[j], &values[j + 1]);
          } else {
            values[j] = random_one<kDistribution>(words.word[j], parameters);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) out.value[j] = random_element<T>(a, values[j]);
    }
    if (aligned && first + kShared <= a.count) {
      *reinterpret_cast<Neighbours<T, kShared>*>(result + first) = out;
    } else {
      for (int j = 0; j < kShared && first + j < a.count; ++j) result[first + j] = out.value[j];
    }
  }
}

template <class T, Distribution kDistribution>
void launch(const RandomFill& a, cudaStream_t stream) {
  constexpr int kShared = sizeof(T) == 8 && kDistribution != Distribution::kBernoulli ? 2 : 4;
  const int64_t blocks = (random_blocks(a.type, a.distribution, a.count) + kThreads - 1) / kThreads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{1} << 20));
  const bool aligned = reinterpret_cast<uintptr_t>(a.result) % sizeof(Neighbours<T, kShared>) == 0;
  random_fill_kernel<T, kDistribution><<<grid, kThreads, 0, stream>>>(a, aligned);
}

}  // namespace

void random_fill(const RandomFill& a, void* stream) {
  if (a.count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  with_random_type(a.type, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 1) {  // booleans
      launch<T, Distribution::kBernoulli>(a, cuda_stream);
    } else {
      with_distribution(a.distribution, [&](auto constant) { launch<T, decltype(constant)::value>(a, cuda_stream); });
    }
  });
}

}  // namespace quartz::kernels::cuda
