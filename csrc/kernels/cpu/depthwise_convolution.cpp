#include "kernels/depthwise_convolution.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

// The row as floats, with zeros around it, so that each tap is a loop over neighbours.
template <class T>
void rows(const DepthwiseConvolution& a, int64_t begin, int64_t end) {
  const int64_t reach = (a.outputs - 1) * a.stride + (a.taps - 1) * a.dilation + 1;
  const int64_t padded = std::max(reach, a.padding + a.length);
  const auto memory = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(padded + a.outputs));
  float *in = memory.get(), *sums = in + padded;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t out_channels = a.channels * a.multiplier, n = row / out_channels, c = row % out_channels;
    const T* x = static_cast<const T*>(a.x) + n * a.x_batch_stride + c / a.multiplier * a.x_channel_stride;
    std::fill_n(in, padded, 0.0f);
    for (int64_t i = 0; i < a.length; ++i) in[a.padding + i] = to_float(x[i]);
    std::fill_n(sums, a.outputs, 0.0f);
    for (int64_t k = 0; k < a.taps; ++k) {
      const float weight = to_float(static_cast<const T*>(a.w)[c * a.taps + k]);
      const float* at = in + k * a.dilation;
      if (a.stride == 1) {
        for (int64_t t = 0; t < a.outputs; ++t) sums[t] = std::fma(at[t], weight, sums[t]);
      } else {
        for (int64_t t = 0; t < a.outputs; ++t) sums[t] = std::fma(at[t * a.stride], weight, sums[t]);
      }
    }
    T* y = static_cast<T*>(a.y) + row * a.outputs;
    const float bias = a.bias != nullptr ? to_float(static_cast<const T*>(a.bias)[c]) : 0.0f;
    for (int64_t t = 0; t < a.outputs; ++t) y[t] = from_float<T>(sums[t] + bias);
  }
}

}  // namespace

void depthwise_convolution(const DepthwiseConvolution& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    using T = decltype(x);
    parallel.run(a.batch * a.channels * a.multiplier, row_grain(a.outputs * a.taps, 16384),
                 [&](int64_t begin, int64_t end) { rows<T>(a, begin, end); });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
