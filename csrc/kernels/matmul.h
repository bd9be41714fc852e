// Matrix products: out[m, n] = act(alpha * sum_k x[m, k] w[n, k] + beta * bias[m, n]), one or a batch of them.
//
// Order of arithmetic on the CPU, a function of k alone. The sum is cut into chains of 256 k; a chain starts at +0 and
// takes its products by fused multiply-add in float, the results of the chains are added in ascending order.
//   float32, float16: k ascending; subnormal numbers are kept.
//   bfloat16: pairs (2i, 2i + 1) ascending, of each pair the odd k first; an odd k gets a partner of zeros. Subnormal
//     numbers count as zero from the inputs to the activation (DAZ, FTZ). That is what vdpbf16ps does, so the
//     instruction and fused multiply-adds give the same bits, and each processor takes the faster.
// Then, in float: times alpha, plus the rounded beta * bias (left out where bias is null), the activation; a NaN
// becomes the quiet NaN 0x7fc00000; one rounding. Rows, columns, batches, neighbours, threads, blocking, strides and
// whether x and w are exchanged appear nowhere. The modes of the calling thread (flush to zero, rounding) do not count.
//
// gelu(v) = v Phi(v), gelu_tanh(v) = v / (1 + exp(-2 sqrt(2/pi) (v + 0.044715 v^3))), silu(v) = v / (1 + exp(-v)),
// gelu_quick(v) = v / (1 + exp(-1.702 v)).
// A quantised w is decoded, as quantized_weight.h says, with subnormal numbers kept, and takes part like a plain one;
// the sums are then multiplied with its outer scale and with x_scales, in this order, before alpha. On CUDA:
// matmul_cuda.h, quantized_cuda.h.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/quantized_weight.h"
#include "kernels/ragged.h"

namespace quartz::kernels {

enum class Activation : uint8_t { kNone, kRelu, kSilu, kGelu, kGeluTanh, kGeluQuick };

struct Matmul {
  struct Strides {  // in elements; any value, 0 and negative too, for what is read
    int64_t batch, row, column;
  };
  const void* x;     // rows m, columns k, of `dtype`
  const void* w;     // rows n, columns k, of `dtype`
  const void* bias;  // rows m, columns n, of `dtype`; or null
  void* out;         // rows m, columns n, of `out_dtype`; overlaps none of the others, except that it may be bias
  Strides x_strides, w_strides, bias_strides, out_strides;
  int64_t batch, m, n, k;  // with offsets, the ragged size is ignored
  float alpha, beta;
  Activation activation;
  DType dtype, out_dtype;  // out_dtype: that of `dtype`, or float32
  Ragged ragged;
  const int32_t* offsets;           // `batch` of them, ascending; in the memory of the kernel
  QuantizedWeight quantized = {};   // if it is not plain, in the place of w; ragged may be kNone or kM
  const float* x_scales = nullptr;  // of each row of x; or null; not with offsets
};

QUARTZ_CPU_KERNEL(void, matmul, (const Matmul& a, const Parallel& parallel), (a, parallel))

}  // namespace quartz::kernels
