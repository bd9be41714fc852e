// A thread a block of random words: four elements.
#include "kernels/dropout.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T value[4];
};

template <class T>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const Dropout a, BernoulliWords ones, bool aligned) {
  const RandomSource source = a.source.resolved();
  const T* x = static_cast<const T*>(a.x);
  T* result = static_cast<T*>(a.result);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x; 4 * block < a.count; block += step) {
    const PhiloxWords words = source.block(block);
    const int64_t first = 4 * block;
    if (aligned && first + 4 <= a.count) {
      const Four<T> in = *reinterpret_cast<const Four<T>*>(x + first);
      Four<T> out;
      Four<uint8_t> mask;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool kept = ones.has(words.word[j]);
        mask.value[j] = kept;
        out.value[j] = dropped(in.value[j], kept, a.scale);
      }
      *reinterpret_cast<Four<T>*>(result + first) = out;
      *reinterpret_cast<Four<uint8_t>*>(a.mask + first) = mask;
    } else {
      for (int j = 0; j < 4 && first + j < a.count; ++j) {
        const bool kept = ones.has(words.word[j]);
        a.mask[first + j] = kept;
        result[first + j] = dropped(x[first + j], kept, a.scale);
      }
    }
  }
}

template <class T>
void launch(const Dropout& a, cudaStream_t stream) {
  const int64_t blocks = (a.count + 4 * kThreads - 1) / (4 * kThreads);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{1} << 20));
  const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
  const bool aligned = (address(a.x) | address(a.result)) % sizeof(Four<T>) == 0 && address(a.mask) % 4 == 0;
  dropout_kernel<T><<<grid, kThreads, 0, stream>>>(a, BernoulliWords(a.keep), aligned);
}

}  // namespace

void dropout(const Dropout& a, void* stream) {
  if (a.count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (a.dtype) {
    case DType::kFloat32:
      return launch<float>(a, cuda_stream);
    case DType::kFloat16:
      return launch<Float16>(a, cuda_stream);
    default:
      return launch<BFloat16>(a, cuda_stream);
  }
}

}  // namespace quartz::kernels::cuda
