// Attention on CUDA: kernels/attention.h's operator. Two implementations: tiles on the tensor cores (Hopper; float16
// and bfloat16), and a general one (any GPU, float32 too, any sizes and strides).
//
// Numerics of the tile kernels, version 1. The bits of a row are a function of its query and of the keys and values by
// position alone: not of other rows, the plan, the page size, or how many queries came in one call.
//  - Keys in tiles of 128 from position 0. Scores of a tile: one chain of products over the head in steps of 16.
//  - Online softmax once a tile, ascending: new maximum n, factor a = ex2((m - n) c), p = ex2(fma(s, c, -n c)) with
//    c = scale log2(e); row sums of the unrounded p, two chains over the columns of a lane (2 (lane % 4) + {0, 1} + 8
//    j), added; l = fma(l, a, sum). p is rounded to the dtype, O = a O + p V in fp32 products. ex2 is ex2.approx.ftz.
//  - Chunks of tiles (attention_plan.h) begin with a fresh (m, l, O). The four lanes' sums are added at a chunk's end;
//    finished chunks are folded left to right: n = max(M, m), a = ex2((M - n) c), b = ex2((m - n) c),
//    L = fma(l, b, L a), O = fma(o, b, O a). A sink is the last to be folded, with l = 1 and o = 0.
//  - o = fma(O, 1 / L, 0), rounded once. A product with exactly 1 may be left out; a masked key contributes exactly
//    nothing. An additive mask is divided by the scale and added to s; what comes below -2^100 counts as -2^100.
// Known limit: a NaN or infinity in the value row of a key that only later queries of the same 64-row block may see
// reaches the earlier ones of the block (0 x NaN in the product), as in PyTorch's kernels. Looking through the tiles
// that are masked in part, with a way by rows for those where one is found, was tried: the bits were right, but prefill
// took 4 to 12 % longer (H200). Values beyond the valid keys or before the window are never read into a result.
//
// The general kernel: tiles of 128 keys from position 0, online softmax, one chain of fma a score and a value; a key
// whose p is 0 contributes nothing, whatever its value holds.
#pragma once

#include "kernels/attention.h"
#include "kernels/attention_plan.h"
#include "kernels/write_kv.h"

#ifdef QUARTZ_WITH_CUDA
namespace quartz::kernels::cuda {

// What Attention does not say.
struct AttentionExtras {
  int64_t blocks = 0;        // paged: of k and v; 0: unknown
  int64_t most_queries = 0;  // ragged: of one sequence; 0: unknown
  // The plan, the block table and key_begin were complete before the kernel that precedes in the stream: it and this
  // call may overlap (programmatic dependent launch).
  bool overlap_previous = false;
};

// The reason why the tile kernels do not serve a call, or null.
const char* tile_attention_unsupported(const Attention& a);

struct AttentionPlan {
  AttentionPlanInput input;
  AttentionPlanRoom room;
};
// Host only; needs no lengths. The same for all calls of a step: it depends on shapes and options.
AttentionPlan prepare_attention(const Attention& a, const AttentionExtras& extras);
// Fills `words` (plan.room.words() of them, in device memory) by a kernel of one block.
void make_attention_plan(const AttentionPlan& plan, int32_t* words, void* stream);
int64_t attention_workspace(const AttentionPlan& plan, int64_t head_size, int64_t value_size);  // bytes
// `words` is in use by one stream at a time. `workspace`: aligned to 256 bytes; its contents do not matter.
void tile_attention(const Attention& a, const AttentionExtras& extras, const AttentionPlan& plan, int32_t* words,
                    void* workspace, void* stream);

void general_attention(const Attention& a, int64_t blocks, void* stream);

// Keys, and values if there are any, in one launch; the slots are those of `key`. Slots outside the cache's `blocks`
// are skipped; which of several rows for one slot stays is not defined.
void write_kv(const WriteKv& key, const WriteKv* value, int64_t blocks, void* stream);

}  // namespace quartz::kernels::cuda
#endif
