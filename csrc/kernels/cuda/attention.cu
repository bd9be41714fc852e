// The host side of the tile kernels.
#include <algorithm>
#include <cmath>

#include "kernels/attention_cuda.h"
#include "kernels/cuda/attention_launch.h"

namespace quartz::kernels::cuda {
namespace {

using attention_kernels::Kind;
using attention_kernels::Maps;
using attention_kernels::Params;

constexpr double kLog2E = 1.4426950408889634;

int padded_size(int64_t head_size, int64_t value_size) {
  const int64_t size = std::max(head_size, value_size);
  return size <= 64 ? 64 : size <= 128 ? 128 : 256;
}

int log2_of(int64_t power) {
  int log2 = 0;
  while ((int64_t{1} << log2) < power) ++log2;
  return log2;
}

int64_t padded_to_256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Keys of a copy: the largest power of two, up to a tile, of which pages consist.
int box_rows(const Attention& a) {
  if (a.block_table.data == nullptr) return kAttentionTile;
  int rows = 1;
  while (rows < kAttentionTile && a.block_size % (2 * rows) == 0) rows *= 2;
  return rows;
}

struct Workspace {
  int64_t partial, partial_ml, scratch, size;  // offsets in bytes
};
Workspace divide_workspace(const AttentionPlanRoom& room, int d) {
  const int64_t rows = int64_t{room.slots} * room.slot_rows;
  Workspace w{};
  w.partial_ml = padded_to_256(rows * d * 4);
  w.scratch = w.partial_ml + padded_to_256(rows * 8);
  w.size = w.scratch + (d == 256 && room.wide > 0 ? int64_t{room.processors} * 128 * 256 * 4 : 0);
  return w;
}

bool aligned(const void* data, const AttentionStrides& s, int64_t batches, int64_t heads, int64_t rows) {
  const auto fine = [](int64_t extent, int64_t stride) { return extent <= 1 || (stride > 0 && stride % 8 == 0); };
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && fine(batches, s.batch) && fine(heads, s.head) &&
         fine(rows, s.row);
}

// A dimension of one element may have any stride, an empty one counts as one element.
MapDimension dimension(int64_t extent, int64_t stride, int box) {
  return {std::max<int64_t>(extent, 1), extent <= 1 ? 8 : stride, box};
}

// Copies of 64 columns x `heads` x `rows` of queries, or 64 columns x `rows` of one head of keys or values.
CUtensorMap query_map(const Attention& a, int heads, int rows) {
  const bool ragged = a.query_starts.data != nullptr;
  return tensor_map(a.q, a.dtype,
                    {{a.head_size, 1, 64},
                     dimension(a.heads, a.q_strides.head, heads),
                     dimension(a.queries, a.q_strides.row, rows),
                     dimension(ragged ? 1 : a.batch, a.q_strides.batch, 1)});
}
CUtensorMap key_map(const Attention& a, const void* data, const AttentionStrides& s, int64_t size, int rows,
                    const AttentionExtras& extras) {
  const bool paged = a.block_table.data != nullptr;
  return tensor_map(data != nullptr ? data : a.q, a.dtype,
                    {{size, 1, 64},
                     dimension(paged ? a.block_size : a.keys, s.row, rows),
                     dimension(a.kv_heads, s.head, 1),
                     dimension(!paged              ? a.batch
                               : extras.blocks > 0 ? extras.blocks
                                                   : int64_t{1} << 31,
                               s.batch, 1)},
                    128);  // measured: with 256, decoding takes 5 % longer
}

template <class T>
void launch(int d, Kind kind, const Maps& maps, const Params& p, int blocks, bool overlap, cudaStream_t stream) {
  switch (d) {
    case 64:
      return attention_kernels::launch<T, 64>(kind, maps, p, blocks, overlap, stream);
    case 128:
      return attention_kernels::launch<T, 128>(kind, maps, p, blocks, overlap, stream);
    default:
      return attention_kernels::launch<T, 256>(kind, maps, p, blocks, overlap, stream);
  }
}

template <class T>
void run(const Attention& a, const AttentionExtras& extras, const AttentionPlanRoom& room, int32_t* words, void* memory,
         cudaStream_t stream) {
  const int d = padded_size(a.head_size, a.value_size);
  const Workspace workspace = divide_workspace(room, d);
  auto* const bytes = static_cast<char*>(memory);
  const bool paged = a.block_table.data != nullptr;
  const int group = attention_group(a.heads, a.kv_heads);

  Params p{};
  p.plan = words;
  p.offsets = words + room.offsets_at();
  p.folds = reinterpret_cast<const AttentionFold*>(words + room.folds_at());
  p.block_table = a.block_table;
  p.table_stride = a.block_table_stride;
  p.key_begin = a.key_begin;
  p.out = a.out;
  p.out_batch = a.out_strides.batch;
  p.out_token = a.out_strides.row;
  p.out_head = a.out_strides.head;
  p.lse = a.logsumexp;
  p.lse_batch = a.logsumexp_strides.batch;
  p.lse_token = a.logsumexp_strides.row;
  p.lse_head = a.logsumexp_strides.head;
  p.partial = reinterpret_cast<float*>(bytes + workspace.partial);
  p.partial_ml = reinterpret_cast<float2*>(bytes + workspace.partial_ml);
  p.scratch = reinterpret_cast<float*>(bytes + workspace.scratch);
  p.sinks = a.sinks;
  p.mask = a.mask_kind != MaskKind::kNone ? a.mask : nullptr;
  p.mask_kind = a.mask_kind;
  p.mask_batch = a.mask_strides[0];
  p.mask_head = a.mask_strides[1];
  p.mask_query = a.mask_strides[2];
  p.mask_key = a.mask_strides[3];
  p.slot_rows = room.slot_rows;
  p.group = group;
  p.heads_per_key = static_cast<int>(a.heads / a.kv_heads) / group;
  p.value_size = static_cast<int>(a.value_size);
  p.batched = a.query_starts.data == nullptr;
  p.block_size = paged ? static_cast<int>(a.block_size) : 0;
  p.block_size_log2 = (p.block_size & (p.block_size - 1)) == 0 ? log2_of(p.block_size) : -1;
  p.window = static_cast<int>(std::min<int64_t>(a.window, 1 << 30));
  p.causal = a.causal;
  // Several units that read the same keys.
  p.keep_keys = p.heads_per_key > 1 || room.keys_shared;
  // Measured: pays while few blocks of queries share the keys in L2, and always where a tile is little work.
  p.alternate = d == 64 || room.wide < 1024;
  // p = ex2(c (s - max)): c counts the scale, unless a soft cap has already.
  const bool capped = a.soft_cap > 0.0f;
  p.c = capped ? static_cast<float>(kLog2E) : static_cast<float>(kLog2E * a.scale);
  p.c_inverse = capped ? 1.0f : 1.0f / a.scale;
  p.cap = a.soft_cap;
  p.cap_c1 = capped ? static_cast<float>(2 * kLog2E * a.scale / a.soft_cap) : 0.0f;

  const bool full = a.window > 0 || capped || p.mask != nullptr || a.key_begin.data != nullptr;
  Maps maps{};
  const int rows = box_rows(a);
  p.box_rows_log2 = log2_of(rows);
  maps.key = key_map(a, a.k, a.k_strides, a.head_size, rows, extras);
  maps.value = key_map(a, a.v, a.v_strides, a.value_size, rows, extras);
  bool overlap = extras.overlap_previous;
  if (room.split_units > 0) {
    p.items = reinterpret_cast<const AttentionItem*>(words + room.items_at());
    p.counters = words + kPlanCounters;
    p.query_box = room.slot_rows;
    maps.query = query_map(a, group, room.split_tokens);
    const Kind kind = full                  ? attention_kernels::kSplitFull
                      : room.slot_rows <= 8 ? attention_kernels::kOneRow
                                            : attention_kernels::kSplit;
    launch<T>(d, kind, maps, p, room.processors, overlap, stream);
    if (room.folds > 0) attention_kernels::launch_fold<T>(d, p, room.folds, stream);
    overlap = true;  // what the wide kernel reads before it waits was complete before the split kernel
  }
  if (room.wide > 0) {
    const int tokens = 64 / group;
    p.items = reinterpret_cast<const AttentionItem*>(words + room.wide_at());
    p.counters = words + kPlanCounters + 2;
    p.query_box = tokens * group;
    maps.query = query_map(a, group, tokens);
    launch<T>(d, full ? attention_kernels::kWideFull : attention_kernels::kWide, maps, p, room.processors, overlap,
              stream);
  }
}

}  // namespace

const char* tile_attention_unsupported(const Attention& a) {
  if (a.dtype != DType::kBFloat16 && a.dtype != DType::kFloat16) return "the dtype is neither bfloat16 nor float16";
  if (a.head_size < 8 || a.head_size > 256 || a.head_size % 8 != 0)
    return "the head size is no multiple of 8 up to 256";
  if (a.value_size < 8 || a.value_size > 256 || a.value_size % 8 != 0) {
    return "the size of a value is no multiple of 8 up to 256";
  }
  if (!(a.scale > 0.0f) || !std::isfinite(a.scale)) return "the scale is not above zero";
  const bool ragged = a.query_starts.data != nullptr, paged = a.block_table.data != nullptr;
  const int64_t batches = ragged ? 1 : a.batch, blocks = paged ? 2 : a.batch, slots = paged ? a.block_size : a.keys;
  if (!aligned(a.q, a.q_strides, batches, a.heads, a.queries) ||
      !aligned(a.out, a.out_strides, batches, a.heads, a.queries) ||
      !aligned(a.k, a.k_strides, blocks, a.kv_heads, slots) || !aligned(a.v, a.v_strides, blocks, a.kv_heads, slots)) {
    return "strides or addresses are no multiples of 16 bytes";
  }
  if (ragged && !paged) return "ragged queries need a block table";
  if (ragged && a.mask_kind != MaskKind::kNone) return "a mask needs the dense form";
  constexpr int64_t kMost = int64_t{1} << 30;
  if (a.queries >= kMost || a.keys >= kMost || a.batch >= kMost || a.query_offset >= kMost)
    return "a length is too large";
  return nullptr;
}

AttentionPlan prepare_attention(const Attention& a, const AttentionExtras& extras) {
  AttentionPlan plan{};
  AttentionPlanInput& in = plan.input;
  in.query_starts = a.query_starts;
  in.key_counts = a.key_counts;
  in.key_begin = a.key_begin;
  in.key_end = a.key_end;
  in.sequences = static_cast<int32_t>(a.batch);
  in.queries = static_cast<int32_t>(a.queries);
  in.keys = static_cast<int32_t>(a.keys);
  in.query_offset = static_cast<int32_t>(a.query_offset);
  in.most_queries = static_cast<int32_t>(extras.most_queries);
  in.group = attention_group(a.heads, a.kv_heads);
  in.heads = static_cast<int32_t>(a.heads / in.group);
  in.window = static_cast<int32_t>(std::min<int64_t>(a.window, 1 << 30));
  in.processors = multiprocessors();
  in.causal = a.causal;
  in.wide_allowed = true;
  plan.room = attention_plan_room(in);
  return plan;
}

int64_t attention_workspace(const AttentionPlan& plan, int64_t head_size, int64_t value_size) {
  return std::max<int64_t>(divide_workspace(plan.room, padded_size(head_size, value_size)).size, 256);
}

void tile_attention(const Attention& a, const AttentionExtras& extras, const AttentionPlan& plan, int32_t* words,
                    void* workspace, void* stream) {
  if (a.queries == 0 || a.heads == 0 || a.batch == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  if (a.dtype == DType::kBFloat16) {
    run<BFloat16>(a, extras, plan.room, words, workspace, on);
  } else {
    run<Float16>(a, extras, plan.room, words, workspace, on);
  }
}

}  // namespace quartz::kernels::cuda
