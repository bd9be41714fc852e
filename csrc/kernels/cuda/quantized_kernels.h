// The kernels behind quantized_matmul and quantized_moe, one file a format.
#pragma once

#include "kernels/cuda/quantized_decode.cuh"

namespace quartz::kernels::cuda {

template <WeightFormat kFormat>
void quantized_matmul_of(const QuantizedMatmul& a);

struct MoeProducts {
  const void *x, *h;  // rows of hidden, sorted by expert; rows of width
  MoeProduct up, down;
  QuantizedOperand up_w, down_w;
  int64_t pairs;
  bool few;  // rows of one expert in a tile: kQuantizedFew, else kQuantizedMany
};
constexpr int kQuantizedFew = 16, kQuantizedMany = 64;
template <WeightFormat kFormat>
void quantized_moe_of(const QuantizedMoe& a, const MoeProducts& products);

// False where the kernels cannot read the operand: alignments, blocks.
bool operand_of(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, QuantizedOperand& operand);

}  // namespace quartz::kernels::cuda
