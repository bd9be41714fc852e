// Depthwise convolution over the last dimension, of one or more outputs for each channel:
//
//   y[n, c, t] = b[c] + sum_k w[c, k] * x[n, c / multiplier, t * stride + k * dilation - padding]
//
// Order of arithmetic: one chain of fma over k ascending, from +0, in float; what lies outside of the row counts as
// zeros, and is multiplied as such; then the bias, and one rounding. So an output has the same bits whether zeros
// before its row are padding, or are the state of a sequence that is continued, and wherever the row begins.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct DepthwiseConvolution {
  const void* x;     // rows (n, channel) of `length` contiguous elements
  const void* w;     // (channels * multiplier, taps), contiguous
  const void* bias;  // (channels * multiplier), or null
  void* y;           // (n, channels * multiplier, outputs), contiguous
  int64_t batch, channels, multiplier, length, outputs, taps;
  int64_t x_batch_stride, x_channel_stride;  // in elements
  int64_t stride, dilation, padding;
  DType dtype;
};

QUARTZ_CPU_KERNEL(void, depthwise_convolution, (const DepthwiseConvolution& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void depthwise_convolution(const DepthwiseConvolution& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
