#include "kernels/depthwise_convolution.h"

#include "kernels/cuda/launch.h"
#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// A thread an output.
template <class T>
__global__ void __launch_bounds__(kThreads) convolve(const DepthwiseConvolution a) {
  const int64_t out_channels = a.channels * a.multiplier;
  const int64_t count = a.batch * out_channels * a.outputs, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t t = i % a.outputs, row = i / a.outputs, n = row / out_channels, c = row % out_channels;
    const T* x = static_cast<const T*>(a.x) + n * a.x_batch_stride + c / a.multiplier * a.x_channel_stride;
    const T* w = static_cast<const T*>(a.w) + c * a.taps;
    const int64_t first = t * a.stride - a.padding;
    float sum = 0.0f;
    for (int64_t k = 0; k < a.taps; ++k) {
      const int64_t at = first + k * a.dilation;
      sum = fmaf(at >= 0 && at < a.length ? widen(x[at]) : 0.0f, widen(w[k]), sum);
    }
    static_cast<T*>(a.y)[i] = narrow<T>(sum + (a.bias != nullptr ? widen(static_cast<const T*>(a.bias)[c]) : 0.0f));
  }
}

}  // namespace

void depthwise_convolution(const DepthwiseConvolution& a, void* stream) {
  const int64_t count = a.batch * a.channels * a.multiplier * a.outputs;
  if (count == 0) return;
  const auto blocks =
      static_cast<unsigned>(count < int64_t{kThreads} << 20 ? (count + kThreads - 1) / kThreads : 1 << 20);
  with_dtype(a.dtype, [&]<class T>() { convolve<T><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a); });
  check(cudaGetLastError(), "depthwise convolution");
}

}  // namespace quartz::kernels::cuda
