// The kernels behind `matmul`, one file each. The tile is chosen within, for speed only: none touches the bits.
#pragma once

#include "kernels/cuda/matmul_groups.cuh"

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
void matmul_general(const Matmul& a, const Groups& groups = {});   // 16 bits, any strides
void matmul_float(const Matmul& a, const Groups& groups = {});     // fp32, any strides
// Groups by k, x as [k, m], w as [k, n], both copyable.
void matmul_grouped_sums(const Matmul& a, const MoeTile* ranges);
constexpr int kGeneralTile = 64;  // both sides of the tile of those two for groups

// Whether the copy engine can read [batch, rows, k] of 16-bit elements, and which dimension is adjacent in memory.
bool can_copy(const void* data, int64_t batch, int64_t rows, int64_t k, int64_t batch_stride, int64_t row,
              int64_t column, bool& k_major);

}  // namespace quartz::kernels::cuda
