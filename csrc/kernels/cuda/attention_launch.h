// What the host code of attention (attention.cu) and its kernels (attention_<dtype>_<head size>.cu) share.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "kernels/attention_plan.h"
#include "kernels/cuda/launch.h"
#include "kernels/dtype.h"

namespace quartz::kernels::cuda::attention_kernels {

struct Params {
  const int32_t* plan;  // its words
  const AttentionItem* items;
  const int32_t* offsets;
  int32_t* counters;
  const AttentionFold* folds;
  Indices block_table;
  int64_t table_stride;
  Indices key_begin;  // dense: the row of k and v that holds key 0 of each sequence; null: 0
  void* out;
  int64_t out_batch, out_token, out_head;
  float* lse;
  int64_t lse_batch, lse_token, lse_head;
  float* partial;      // [slot][row][D]
  float2* partial_ml;  // [slot][row]
  float* scratch;      // a wide block's folded chunks where shared memory is too small for them
  const float* sinks;
  const void* mask;
  int64_t mask_batch, mask_head, mask_query, mask_key;
  MaskKind mask_kind;
  int slot_rows, group, heads_per_key, value_size, batched;
  int query_box;        // rows of queries that one copy brings
  int box_rows_log2;    // keys that one copy brings
  int block_size;       // slots of a page; dense: 0
  int block_size_log2;  // -1: no power of two
  int window;           // 0: none
  int causal, keep_keys, alternate;
  float c, c_inverse, cap, cap_c1;  // c_inverse: log2(e) / c
};

// Full: with window, soft cap and masks. OneRow: at most 8 rows of queries a unit.
enum Kind { kOneRow, kSplit, kSplitFull, kWide, kWideFull };  // Full: window, soft cap and masks too

struct Maps {
  CUtensorMap query, key, value;
};

// Head sizes are padded to D: 64, 128 or 256.
template <class T, int D>
void launch(Kind kind, const Maps& maps, const Params& p, int blocks, bool overlap, cudaStream_t stream);

// Folds the partial results of the split kernel. `folds`: of the plan.
template <class T>
void launch_fold(int d, const Params& p, int64_t folds, cudaStream_t stream);

}  // namespace quartz::kernels::cuda::attention_kernels
