// Attention: dense (any strides, masks, biases) and paged with ragged query lengths, one kernel body.
//
//   score(i, j) = cap(sum_d (q[i, d] * scale) * k[j, d]) + bias[i, j],   cap(s) = soft_cap * tanh(s / soft_cap)
//   out[i]      = sum_j p(i, j) v[j] / (sum_j p(i, j) + exp(sink - m)),  p(i, j) = exp(score(i, j) - m)
//
// over the keys j that query i may see; m is the largest of their scores (and the sink). A key that a query may not see
// has the score -inf, and one whose p is 0 contributes nothing, whatever its value row holds. Rows without keys are 0.
//
// Order of arithmetic, a function of the row and of the keys it sees, in their order, alone:
//   score:  one chain of fma over d ascending, from +0, on q * scale rounded to float;
//   m:      the exact maximum;
//   sum:    p rounded to a multiple of 2^-38 and added as integers, so that the order does not matter;
//   values: one chain of fma over the keys ascending, from +0 (and + 0 at the end, so that no -0 leaves);
//   one division, one rounding.
// No tile, no split and no absolute position appears in it: a prompt in one piece, in chunks, token by token, verified
// in rows, paged, behind padding on the left or in a cache that keeps the last keys of a window only gives the same
// bits.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

// An array of int32 or int64.
struct Indices {
  const void* data;
  bool wide;
  QUARTZ_HD int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

enum class MaskKind : uint8_t { kNone, kVisible, kFloat32, kFloat16, kBFloat16 };  // kVisible: bool, true = may be seen

// In elements. The last dimension of q, k, v and out is contiguous.
struct AttentionStrides {
  int64_t batch, head, row;
};

struct Attention {
  DType dtype;                                   // of q, k, v and out
  int64_t batch, heads, kv_heads;                // heads is a multiple of kv_heads; head h reads h / (heads / kv_heads)
  int64_t queries, keys, head_size, value_size;  // ragged: queries and keys are the largest of any sequence
  const void *q, *k, *v;
  void* out;
  AttentionStrides q_strides, k_strides, v_strides, out_strides;  // paged: the batch stride of k and v is a block's
  float* logsumexp;                                               // or null
  AttentionStrides logsumexp_strides;

  // Ragged: sequence b has the rows query_starts[b] to query_starts[b + 1] of q and key_counts[b] keys, and its last
  // query stands at its last key.
  Indices query_starts, key_counts;  // both null in the dense form
  // Paged: key j of sequence b is row j % block_size of block block_table[b * block_table_stride + j / block_size].
  Indices block_table;  // null in the dense form
  int64_t block_table_stride, block_size;

  float scale, soft_cap;  // soft_cap 0: none
  bool causal;            // query i, at position query_offset + i, sees keys 0 to its position
  int64_t window;         // and the last `window` of them, its own included; 0: all
  int64_t query_offset;   // of the dense form
  // Of the dense form, or null: sequence b sees only the keys [key_begin[b], key_end[b]). Its key key_begin[b] stands
  // at position 0, which matters where an order counts from there (tiles on CUDA). A negative one says that the keys
  // before row 0 are no longer stored: that many positions precede it.
  Indices key_begin, key_end;
  const float* sinks;  // a logit for each head, or null

  MaskKind mask_kind;  // dense only; kVisible hides keys, the others are added to the score
  const void* mask;
  int64_t mask_strides[4];  // batch, head, query, key; 0 where broadcast
};

QUARTZ_CPU_KERNEL(void, attention, (const Attention& a, const Parallel& parallel), (a, parallel))

}  // namespace quartz::kernels
