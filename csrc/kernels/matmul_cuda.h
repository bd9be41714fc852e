// Matrix products on CUDA (sm_90a): out = activation(alpha x w^T + beta bias), for every batch.
//
// One output is one chain of fp32 sums over ascending k; K is never split and nothing depends on M, on the row's place
// or on its neighbours:
// - bf16, fp16: steps of 16 k on the tensor cores (the sum within a step is the hardware's), a zero is +0;
// - fp32: one fused multiply-add a step (no TF32), a zero is +0.
// Then, in fp32: times alpha, plus beta times bias, activation; and one rounding to the output's type.
#pragma once

#include "kernels/dtype.h"
#include "kernels/ragged.h"

namespace quartz::kernels::cuda {

enum class Activation : uint8_t {
  kNone,
  kRelu,
  kSilu,       // v sigmoid(v)
  kGeluTanh,   // v sigmoid(2 sqrt(2 / pi) (v + 0.044715 v^3)), which is torch's gelu(approximate="tanh")
  kGeluQuick,  // v sigmoid(1.702 v)
  kGelu,       // v (1 + erf(v / sqrt(2))) / 2
};

struct Matmul {
  const void* x;     // [batch, m, k]
  const void* w;     // [batch, n, k]: a weight of linear as it is, the second matrix of mm with its strides swapped
  const void* bias;  // [batch, m, n] with strides (0 where it is the same), or null
  void* out;         // [batch, m, n]; the elements of a row are adjacent
  int64_t batch, m, n, k;  // any, 0 too
  // In elements. The kernels that use the copy engine want one of the two strides of x and of w to be 1 and the other
  // to be a multiple of 16 bytes, as the address itself and the batch stride; all else takes a slower kernel.
  int64_t x_batch, x_row, x_k;
  int64_t w_batch, w_row, w_k;
  int64_t bias_batch, bias_row;  // the elements of a row of bias are adjacent
  int64_t out_batch, out_row;
  DType dtype;       // of x and w
  DType out_dtype;   // dtype, or float32
  DType bias_dtype;  // dtype, or float32
  float alpha = 1, beta = 1;
  Activation activation = Activation::kNone;
  // The weights (and nothing else) may be read before the kernels launched earlier on the stream have ended. Only for
  // weights that no kernel in flight writes.
  bool frozen_weights = false;
  void* stream = nullptr;
};

// False, with nothing launched, for a combination of types that is not served. Throws std::runtime_error if CUDA
// refuses the launch.
bool matmul(const Matmul& a);

// Products of `batch` groups: offsets cut the dimension that `ragged` names (m: rows of x and out; n: rows of w,
// columns of out; k: columns of x and w). The tensors that have the dimension have no batch stride. Offsets are in the
// memory of the GPU and not read by the host: one below an earlier one makes an empty group, one beyond the dimension
// ends there. Rows or columns of no group become 0. Neither bias nor activation; out_dtype is dtype. The workspace is
// for matmul_grouped_workspace(a, ragged) bytes, aligned to 16.
int64_t matmul_grouped_workspace(const Matmul& a, Ragged ragged);
void matmul_grouped(const Matmul& a, Ragged ragged, const int32_t* offsets, void* workspace);

}  // namespace quartz::kernels::cuda
