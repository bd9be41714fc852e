// The pieces of the experts layer; see moe_experts.cu for how they follow each other.
#pragma once

#include "kernels/cuda/moe_decode.cuh"

namespace quartz::kernels::cuda {

struct MoePlan {
  enum class Kind { kFew, kWholeBatch, kSorted, kPrefill } kind;
  MoeCaps caps;
  MoeTables tables;
  void *sorted_x, *h, *o;  // rows of hidden (kSorted only), width and hidden elements
  int64_t pairs;
  MoeProduct up, down;
};

// The parts of the workspace of a plan whose kind and caps are set; returns its size.
int64_t moe_workspace(const MoeExperts& a, MoePlan& plan);
// The parameters of the first or the second product.
MoeProduct moe_product_of(const MoeExperts& a, const MoePlan& plan, bool up);
void moe_gather(const MoeExperts& a, const MoePlan& plan);   // x to sorted_x
void moe_combine(const MoeExperts& a, const MoePlan& plan);  // o to y

// Both products of the plan.
void moe_products_decode(const MoeExperts& a, const MoePlan& plan);
void moe_products_prefill(const MoeExperts& a, const MoePlan& plan);

// The second product alone, over the tiles of p.tables: down_tiles of at most kMoeDecodeRows rows, up_tiles of at most
// 128 (the prefill has one table). h: [rows, k], rows h_row apart.
constexpr int kMoeDecodeRows = 32;
void moe_down_decode(const void* h, int64_t h_row, const void* w, DType dtype, bool k_major, int64_t rows, int64_t k,
                     const MoeProduct& p, void* stream);
void moe_down_prefill(const void* h, int64_t h_row, const void* w, DType dtype, bool k_major, int64_t rows, int64_t k,
                      const MoeProduct& p, void* stream);

}  // namespace quartz::kernels::cuda
