// The kernels behind `matmul`, one file each. The tile is chosen within, for speed only: none touches the bits.
#pragma once

#include "kernels/matmul_cuda.h"

namespace quartz::kernels::cuda {

// What the copy engine can read, and how each operand lies.
struct Layout {
  bool aligned;    // both operands can be copied
  bool x_k_major;  // the k of a row are adjacent
  bool w_k_major;
};

void matmul_decode(const Matmul& a);   // aligned, both k-major, m <= 64
void matmul_cluster(const Matmul& a);  // aligned, both k-major, no activation, m <= 256; tile by n
void matmul_prefill(const Matmul& a);  // aligned, both k-major, no activation
void matmul_prefill_mixed(const Matmul& a, const Layout& layout);  // aligned
void matmul_general(const Matmul& a);                              // 16 bits, any strides
void matmul_float(const Matmul& a);                                // fp32, any strides

}  // namespace quartz::kernels::cuda
