// A thread a block of four elements.
#include "kernels/random_fill.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
struct alignas(4 * sizeof(T)) Quad {
  T value[4];
};

template <class T, Distribution kDistribution>
__global__ void __launch_bounds__(kThreads) random_fill_kernel(const RandomFill a, bool aligned) {
  const FillParameters parameters(a);
  T* result = static_cast<T*>(a.result);
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t block = int64_t{blockIdx.x} * kThreads + threadIdx.x; 4 * block < a.count; block += step) {
    float values[4];
    random_four<kDistribution>(random_block(a, block), parameters.first, parameters.second, parameters.threshold,
                               parameters.bits, values);
    Quad<T> quad;
#pragma unroll
    for (int j = 0; j < 4; ++j) quad.value[j] = random_element<T>(a, values[j]);
    if (aligned && 4 * block + 4 <= a.count) {
      *reinterpret_cast<Quad<T>*>(result + 4 * block) = quad;
    } else {
      for (int j = 0; j < 4 && 4 * block + j < a.count; ++j) result[4 * block + j] = quad.value[j];
    }
  }
}

template <class T>
void typed(const RandomFill& a, cudaStream_t stream) {
  const int64_t blocks = (a.count + 4 * kThreads - 1) / (4 * kThreads);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, int64_t{1} << 20));
  const bool aligned = reinterpret_cast<uintptr_t>(a.result) % sizeof(Quad<T>) == 0;
  switch (a.distribution) {
    case Distribution::kUniform:
      random_fill_kernel<T, Distribution::kUniform><<<grid, kThreads, 0, stream>>>(a, aligned);
      break;
    case Distribution::kNormal:
      random_fill_kernel<T, Distribution::kNormal><<<grid, kThreads, 0, stream>>>(a, aligned);
      break;
    case Distribution::kExponential:
      random_fill_kernel<T, Distribution::kExponential><<<grid, kThreads, 0, stream>>>(a, aligned);
      break;
    default:
      random_fill_kernel<T, Distribution::kBernoulli><<<grid, kThreads, 0, stream>>>(a, aligned);
  }
}

}  // namespace

void random_fill(const RandomFill& a, void* stream) {
  if (a.count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (a.dtype) {
    case DType::kFloat32:
      return typed<float>(a, cuda_stream);
    case DType::kFloat16:
      return typed<Float16>(a, cuda_stream);
    default:
      return typed<BFloat16>(a, cuda_stream);
  }
}

}  // namespace quartz::kernels::cuda
