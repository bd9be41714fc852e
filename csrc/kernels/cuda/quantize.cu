// fp8: one block of threads a scale. fp4: one thread a group.
#include "kernels/quantize.h"

#include <cuda_runtime.h>

#include "kernels/quantize_block.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__host__ __device__ int64_t blocks_of(int64_t size, int64_t block) { return (size + block - 1) / block; }

__global__ void __launch_bounds__(kThreads) quantize_fp8_block(const QuantizeFp8 a) {
  __shared__ float shared[kThreads];
  const int64_t across = blocks_of(a.columns, a.block_columns);
  const int64_t row = blockIdx.x / across * a.block_rows, column = blockIdx.x % across * a.block_columns;
  const int64_t height = min(a.block_rows, a.rows - row), width = min(a.block_columns, a.columns - column);
  float largest = 0.0f;
  for (int64_t i = threadIdx.x; i < height * width; i += kThreads) {
    largest = larger_magnitude(largest, element(a.w, (row + i / width) * a.stride + column + i % width, a.dtype));
  }
  shared[threadIdx.x] = largest;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {  // a maximum: its order does not matter
    if (threadIdx.x < step) shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + step]);
    __syncthreads();
  }
  const float scale = fp8_scale(shared[0]);
  if (threadIdx.x == 0) a.scales[blockIdx.x] = scale;
  for (int64_t i = threadIdx.x; i < height * width; i += kThreads) {
    const int64_t r = row + i / width, c = column + i % width;
    a.codes[r * a.columns + c] = float_to_e4m3(element(a.w, r * a.stride + c, a.dtype) / scale);
  }
}

__global__ void __launch_bounds__(kThreads) dequantize_fp8_element(const DequantizeFp8 a) {
  const int64_t across = blocks_of(a.columns, a.block_columns), step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.rows * a.columns; i += step) {
    const float scale = a.scales[i / a.columns / a.block_rows * across + i % a.columns / a.block_columns];
    put(a.w, i, a.dtype, e4m3_to_float(a.codes[i]) * scale);
  }
}

template <class Arguments, void (*GROUP)(const Arguments&, int64_t, int64_t)>
__global__ void __launch_bounds__(kThreads) each_group(const Arguments a, int64_t groups) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.rows * groups; i += step) {
    GROUP(a, i / groups, i % groups);
  }
}

unsigned grid_of(int64_t items) {
  const int64_t blocks = blocks_of(items, kThreads);
  return static_cast<unsigned>(blocks < 65536 ? blocks : 65536);
}

}  // namespace

void quantize_fp8(const QuantizeFp8& a, void* stream) {
  const int64_t blocks = blocks_of(a.rows, a.block_rows) * blocks_of(a.columns, a.block_columns);
  if (blocks == 0) return;
  quantize_fp8_block<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
}

void dequantize_fp8(const DequantizeFp8& a, void* stream) {
  if (a.rows * a.columns == 0) return;
  dequantize_fp8_element<<<grid_of(a.rows * a.columns), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
}

void quantize_fp4(const QuantizeFp4& a, void* stream) {
  const int64_t groups = blocks_of(a.columns, group_of(a.format));
  if (a.rows * groups == 0) return;
  each_group<QuantizeFp4, quantize_fp4_group>
      <<<grid_of(a.rows * groups), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, groups);
}

void dequantize_fp4(const DequantizeFp4& a, void* stream) {
  const int64_t groups = blocks_of(a.columns, group_of(a.format));
  if (a.rows * groups == 0) return;
  each_group<DequantizeFp4, dequantize_fp4_group>
      <<<grid_of(a.rows * groups), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a, groups);
}

}  // namespace quartz::kernels::cuda
