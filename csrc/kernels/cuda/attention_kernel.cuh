// The attention kernel. One producer warp brings tiles into shared memory, one or two warpgroups of 64 query rows
// compute on them. SPLIT: one warpgroup, the plan's split items; else two, its wide items. Both run the same arithmetic
// on the same fragments. Row of a warpgroup = token * group + head.
#pragma once

#include <type_traits>

#include "kernels/attention_plan.h"
#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_numerics.cuh"
#include "kernels/cuda/attention_wgmma.cuh"
#include "kernels/cuda/hopper_attention.cuh"

namespace quartz::kernels::cuda::attention_kernels {

constexpr int kTile = kAttentionTile;

// Shared memory of a block, in bytes.
template <int D, bool SPLIT>
struct Layout {
  static constexpr int kGroups = SPLIT ? 1 : 2;  // warpgroups of 64 rows
  static constexpr int kColumns = D / 64;        // boxes of 64 columns, 128 bytes wide
  static constexpr int kBoxBytes = kTile * 128;  // of keys or values
  static constexpr int kStageBytes = kColumns * kBoxBytes;
  static constexpr int kStages = D == 64 ? (SPLIT ? 5 : 4) : D == 128 ? 2 : 1;
  static constexpr int kQueryBytes = kGroups * 64 * D * 2;
  static constexpr int kQueryBuffers = SPLIT && D < 256 ? 2 : 1;
  static constexpr int kItemBuffers = 4;                 // an item is read until its last result is written
  static constexpr bool kFoldShared = D < 256 || SPLIT;  // else in global memory
  static constexpr int kFoldBytes = kGroups * 64 * D * 4;
  static constexpr int kKeys = kQueryBuffers * kQueryBytes;
  static constexpr int kValues = kKeys + kStages * kStageBytes;
  static constexpr int kFold = kValues + kStages * kStageBytes;
  static constexpr int kBarriers = kFold + (kFoldShared ? kFoldBytes : 0);
  static constexpr int kItems = kBarriers + 16 * (2 * kStages + kQueryBuffers);
  static constexpr int kSize = kItems + 32 * kItemBuffers;
  static constexpr int kThreads = SPLIT ? 160 : 384;
  static_assert(kItems % 32 == 0 || kItems % 16 == 0);
  static_assert(kSize <= 232448, "shared memory of a block");
};

// A ring of buffers between producer and consumers: full[i] and empty[i] are mbarriers.
template <int STAGES>
struct Buffers {
  uint32_t full, empty;  // addresses of the first
  int stage = 0;
  uint32_t phase;
  QUARTZ_DEVICE Buffers(uint32_t barriers, uint32_t first_phase)
      : full(barriers), empty(barriers + 8 * STAGES), phase(first_phase) {}
  QUARTZ_DEVICE void wait_full() const { barrier_wait(full + 8 * stage, phase); }
  QUARTZ_DEVICE void wait_empty() const { barrier_wait(empty + 8 * stage, phase); }
  QUARTZ_DEVICE uint32_t full_barrier() const { return full + 8 * stage; }
  QUARTZ_DEVICE uint32_t empty_barrier() const { return empty + 8 * stage; }
  QUARTZ_DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Matrix descriptors, low words: rows of 64 elements (128 bytes); for the values, boxes of 64 columns 16384 bytes
// apart.
QUARTZ_DEVICE uint32_t row_descriptor(uint32_t address) { return ((address & 0x3ffff) >> 4) | (1u << 16); }
QUARTZ_DEVICE uint32_t value_descriptor(uint32_t address) { return ((address & 0x3ffff) >> 4) | (1024u << 16); }

template <class T, int D>
QUARTZ_DEVICE void scores(float (&s)[64], uint32_t q, uint32_t k) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const uint32_t at_q = q + (i % 4) * 2 + (i / 4) * 512, at_k = k + (i % 4) * 2 + (i / 4) * 1024;
    if (i == 0) {
      scores_first(T{}, s, at_q, at_k);
    } else {
      scores_step(T{}, s, at_q, at_k);
    }
  }
}

template <class T, int D>
QUARTZ_DEVICE void values(float (&o)[D / 2], const uint32_t (&p)[32], uint32_t v, int accumulate) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int keep = i > 0 || accumulate;
    if constexpr (D == 64) {
      values_step_64(T{}, o, p + 4 * i, v + i * 128, keep);
    } else {
#pragma unroll
      for (int half = 0; half < D / 128; ++half) {
        values_step_128(T{}, o + 64 * half, p + 4 * i, v + i * 128 + half * 2048, keep);
      }
    }
  }
}

// The first key that an item's rows may see.
QUARTZ_DEVICE int first_key(const AttentionItem& item, const Params& p) {
  return p.window > 0 ? max(0, item.position + 1 - p.window) : 0;
}

// ---------------------------------------------------------------- producer

template <int D, bool SPLIT, bool FULL>
struct Producer {
  using L = Layout<D, SPLIT>;
  const Params& p;
  const CUtensorMap &query_map, &key_map, &value_map;
  uint32_t shared;
  AttentionItem* items;
  int lane;
  uint64_t policy;
  int tokens_per_group;

  // The page of this lane's slots of a tile (lane < pages of a tile), 0 where nothing is to be read.
  QUARTZ_DEVICE int page_of(const AttentionItem& item, int tile) const {
    if (p.block_table.data == nullptr) return item.sequence;
    const int pages_log2 = 7 - p.page_rows_log2;
    const int key = tile * kTile + (lane << p.page_rows_log2);
    const int low = FULL ? first_key(item, p) : 0;
    if (lane >= (1 << pages_log2) || tile >= item.tile_end || key >= item.keys ||
        (FULL && key + (1 << p.page_rows_log2) <= low)) {
      return 0;
    }
    const int64_t index = ((tile << pages_log2) + lane) >> p.tiles_per_page_log2;
    return static_cast<int>(p.block_table[item.sequence * p.table_stride + index]);
  }

  QUARTZ_DEVICE void load(const CUtensorMap& map, const AttentionItem& item, int tile, int page, int begin,
                          uint32_t target, uint32_t barrier) const {
    const int rows_log2 = p.page_rows_log2, pages_log2 = 7 - rows_log2;
    const int pages = 1 << pages_log2, rows = 1 << rows_log2;
    const int low = FULL ? first_key(item, p) : 0;
    const int used = min(pages, (item.keys - tile * kTile + rows - 1) >> rows_log2);
    const int skipped = FULL ? min(max(low - tile * kTile, 0) >> rows_log2, used) : 0;
    if (lane == 0) barrier_expect(barrier, (used - skipped) * rows * 128 * L::kColumns);
    const int j = lane & (pages - 1), column = lane >> pages_log2;
    const int mine = __shfl_sync(~0u, page, j);
    if (column < L::kColumns && j >= skipped && j < used) {
      const int slot =
          p.block_table.data == nullptr ? begin + tile * kTile : (tile & ((1 << p.tiles_per_page_log2) - 1)) * kTile;
      const uint32_t to = target + column * L::kBoxBytes + j * rows * 128;
      if (SPLIT && !p.keep_keys) {
        copy_4d(to, map, column * 64, slot, item.head / p.heads_per_key, mine, barrier, policy);
      } else {
        copy_box(to, map, column * 64, slot, item.head / p.heads_per_key, mine, barrier);
      }
    }
  }

  __device__ void run(uint32_t key_barriers, uint32_t value_barriers, uint32_t query_barriers) {
    Buffers<L::kStages> keys(key_barriers, 1), values(value_barriers, 1);
    Buffers<L::kQueryBuffers> queries(query_barriers, 1);
    const int grid = gridDim.x, block = blockIdx.x;
    const int total = p.plan[SPLIT ? kPlanAll : kPlanWide];
    const int statics = SPLIT ? p.plan[kPlanStatic] : grid;
    int own = SPLIT ? p.offsets[block] : 0, own_end = SPLIT ? p.offsets[block + 1] : 0;
    const bool shared_work = total > statics;  // some items go to whoever is free
    int x = total, item_stage = 0;
    bool first = true;
    AttentionItem item;
    item.sequence = -1;
    if (block < total) item = p.items[block];
    // What comes before reads nothing but the plan and the block table.
    const auto begin = [&] {
      if (!first) return;
      first = false;
      wait_for_previous_kernel();
      if (shared_work && lane == 0) x = statics + atomicAdd(p.counters, 1);
    };
    for (;;) {
      bool more = true;
      if (first && item.sequence >= 0) {
        // the block's first item, read already
      } else if (SPLIT && own < own_end) {
        item = p.items[own++];
      } else {
        begin();
        x = __shfl_sync(~0u, x, 0);
        more = x < total;
        if (more) {
          item = p.items[x];
          if (lane == 0) x = statics + atomicAdd(p.counters, 1);
        }
      }
      if (!more) item.sequence = -1;
      queries.wait_empty();
      if (lane == 0) items[item_stage] = item;
      item_stage = (item_stage + 1) % L::kItemBuffers;
      __syncwarp();
      if (!more) {
        if (lane == 0) barrier_arrive(queries.full_barrier());
        break;
      }
      int page = page_of(item, item.tile_begin), previous = 0;
      const int slot = p.key_begin != nullptr ? p.key_begin[item.sequence] : 0;
      begin();
      load_queries(item, queries);
      queries.next();
      for (int tile = item.tile_begin; tile <= item.tile_end; ++tile) {
        const int following = page_of(item, tile + 1);
        if (tile < item.tile_end) {
          keys.wait_empty();
          load(key_map, item, tile, page, slot, shared + L::kKeys + keys.stage * L::kStageBytes, keys.full_barrier());
          keys.next();
        }
        if (tile > item.tile_begin) {
          values.wait_empty();
          load(value_map, item, tile - 1, previous, slot, shared + L::kValues + values.stage * L::kStageBytes,
               values.full_barrier());
          values.next();
        }
        previous = page;
        page = following;
      }
    }
    begin();
    if (shared_work && lane == 0) {  // the last block leaves the counters as it found them
      __threadfence();
      if (atomicAdd(p.counters + 1, 1) == grid - 1) {
        p.counters[0] = 0;
        p.counters[1] = 0;
      }
    }
  }

  // Boxes of 64 columns x group x tokens: rows of a warpgroup. What lies behind the item's tokens is never used.
  QUARTZ_DEVICE void load_queries(const AttentionItem& item, const Buffers<L::kQueryBuffers>& ring) const {
    const int groups = item.tokens > tokens_per_group ? 2 : 1;  // warpgroups with rows
    if (lane == 0) barrier_expect(ring.full_barrier(), groups * L::kColumns * p.query_box * 128);
    __syncwarp();
    if (lane < groups * L::kColumns) {
      const int w = lane / L::kColumns, column = lane % L::kColumns;
      copy_box(shared + ring.stage * L::kQueryBytes + w * (64 * D * 2) + column * 8192, query_map, column * 64,
               item.head * p.group, item.token + w * tokens_per_group, p.batched ? item.sequence : 0,
               ring.full_barrier());
    }
  }
};

// ---------------------------------------------------------------- consumers

// Which query the two rows of a lane's fragment belong to, in one register: token within the item and head within the
// block of heads, a byte each. Rows that belong to none have the token 255, which is no item's.
struct LaneRows {
  uint32_t packed = 0;
  QUARTZ_DEVICE void set(int r, int token, int head) {
    packed |= static_cast<uint32_t>(token) << (16 * r) | static_cast<uint32_t>(head) << (16 * r + 8);
  }
  QUARTZ_DEVICE int token(int r) const { return packed >> (16 * r) & 255; }
  QUARTZ_DEVICE int head(int r) const { return packed >> (16 * r + 8) & 255; }
};

template <class T, int D, int KIND>
struct Consumer {
  static constexpr bool kSplitKind = KIND == kOneRow || KIND == kSplit || KIND == kSplitFull;
  static constexpr bool kFull = KIND == kSplitFull || KIND == kWideFull;
  static constexpr int kRows = KIND == kOneRow ? 1 : 2;  // of a lane that are computed
  static constexpr bool kOverlap = D < 256;              // values of a tile beside the scores of the next
  using L = Layout<D, kSplitKind>;

  const Params& p;
  uint8_t* shared_memory;
  uint32_t shared;
  int warpgroup, warp, lane, thread;  // warp, thread: within the warpgroup
  LaneRows rows;
  float4* fold;  // this lane's share of the folded chunks, 32 apart
  float s[64], o[D / 2];
  uint32_t probabilities[32];
  RowState state[2], total[2];
  float factor[2];

  QUARTZ_DEVICE int first_row() const { return warp * 16 + lane / 4; }

  QUARTZ_DEVICE void place(int group) {
    const int tokens = 64 / group;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + 8 * r;
      rows.set(r, row < tokens * group ? warpgroup * tokens + row / group : 255, row % group);
    }
    if constexpr (L::kFoldShared) {
      fold = reinterpret_cast<float4*>(shared_memory + L::kFold + (warpgroup * 4 + warp) * 16 * D * 4) + lane;
    } else {
      fold = reinterpret_cast<float4*>(p.scratch) +
             ((static_cast<int64_t>(blockIdx.x) * L::kGroups + warpgroup) * 4 + warp) * 4 * D + lane;
    }
  }

  // Keys [low, high) of the two rows; those outside get minus infinity.
  QUARTZ_DEVICE void limit(int key0, const int (&low)[2], const int (&high)[2]) {
    if (key0 + kTile > high[0]) {  // the lower row's end comes first
      const int first = 2 * (lane & 3);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int end = high[r] - key0 - first;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (8 * j >= end) s[4 * j + 2 * r] = minus_infinity();
          if (8 * j + 1 >= end) s[4 * j + 2 * r + 1] = minus_infinity();
        }
      }
    }
    if constexpr (kFull) {
      if (key0 < low[1]) {
        const int first = 2 * (lane & 3);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int begin = low[r] - key0 - first;
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            if (8 * j < begin) s[4 * j + 2 * r] = minus_infinity();
            if (8 * j + 1 < begin) s[4 * j + 2 * r + 1] = minus_infinity();
          }
        }
      }
    }
  }

  QUARTZ_DEVICE float masked(float score, int64_t at) const {
    float added;
    switch (p.mask_kind) {
      case MaskKind::kVisible:
        return static_cast<const uint8_t*>(p.mask)[at] != 0 ? score : minus_infinity();
      case MaskKind::kFloat32:
        added = static_cast<const float*>(p.mask)[at];
        break;
      case MaskKind::kFloat16:
        added = to_float(static_cast<const Float16*>(p.mask)[at]);
        break;
      default:
        added = to_float(static_cast<const BFloat16*>(p.mask)[at]);
    }
    if (added == 0.0f) return score;
    if (added == minus_infinity()) return added;
    const float sum = __fmaf_rn(added, p.c_inverse, score);
    return sum < -1e30f ? -1e30f : sum;  // "the smallest number" as a mask: such keys count equally, and only if alone
  }

  // Soft cap and mask.
  QUARTZ_DEVICE void modify(const AttentionItem& item, int key0, const int (&high)[2]) {
    if (p.cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = soft_capped(s[i], p.cap_c1, p.cap);
    }
    if (p.mask != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t base = item.sequence * p.mask_batch + (item.head * p.group + rows.head(r)) * p.mask_head +
                             (item.token + rows.token(r)) * p.mask_query;
        if (rows.token(r) >= item.tokens) continue;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = key0 + 8 * j + 2 * (lane & 3) + e;
            if (key < high[r]) s[4 * j + 2 * r + e] = masked(s[4 * j + 2 * r + e], base + key * p.mask_key);
          }
        }
      }
    }
  }

  // Value rows that no row of the item may see count as zeros: what lies in memory there may be NaN.
  QUARTZ_DEVICE void clear_values(const AttentionItem& item, int tile, int stage) {
    const int key0 = tile * kTile;
    const int low = kFull ? first_key(item, p) - key0 : 0, high = item.keys - key0;
    if (high >= kTile && low <= 0) return;
    const uint32_t target = shared + L::kValues + stage * L::kStageBytes;
    for (int i = thread; i < kTile * L::kColumns * 8; i += 128) {
      const int row = i / (L::kColumns * 8), column = i / 8 % L::kColumns;
      if (row >= low && row < high) continue;
      asm volatile(
          "st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(target + column * L::kBoxBytes + row * 128 + i % 8 * 16), "r"(0)
          : "memory");
    }
    fence_shared_writes();
    named_barrier(3 + warpgroup, 128);
  }

  QUARTZ_DEVICE void softmax() {
    factor[0] = softmax_tile<0>(s, state[0], p.c);
    if constexpr (kRows == 2) factor[1] = softmax_tile<1>(s, state[1], p.c);
  }

  QUARTZ_DEVICE void round_probabilities() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (kRows == 2 || i % 2 == 0) probabilities[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
  }

  // A factor of 1 changes nothing.
  QUARTZ_DEVICE void rescale() {
    if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      o[4 * j] = __fmul_rn(o[4 * j], factor[0]);
      o[4 * j + 1] = __fmul_rn(o[4 * j + 1], factor[0]);
      o[4 * j + 2] = __fmul_rn(o[4 * j + 2], factor[1]);
      o[4 * j + 3] = __fmul_rn(o[4 * j + 3], factor[1]);
    }
  }

  // Adds a finished chunk to what is folded so far; `keep`: leaves the sum in o instead of beside it.
  QUARTZ_DEVICE void fold_chunk(const RowState (&chunk)[2], bool first, bool keep) {
    if (first) {
      total[0] = chunk[0];
      total[1] = chunk[1];
      if (keep) return;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) fold[j * 32] = make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
      return;
    }
    const FoldFactors low = fold_row(total[0], chunk[0].m, chunk[0].l, p.c);
    const FoldFactors high = fold_row(total[1], chunk[1].m, chunk[1].l, p.c);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      float4 x = fold[j * 32];
      x.x = fold_value(x.x, o[4 * j], low);
      x.y = fold_value(x.y, o[4 * j + 1], low);
      x.z = fold_value(x.z, o[4 * j + 2], high);
      x.w = fold_value(x.w, o[4 * j + 3], high);
      if (keep) {
        o[4 * j] = x.x;
        o[4 * j + 1] = x.y;
        o[4 * j + 2] = x.z;
        o[4 * j + 3] = x.w;
      } else {
        fold[j * 32] = x;
      }
    }
  }

  // Writes o and (m, l) of the item's rows as a partial result.
  QUARTZ_DEVICE void write_partial(const AttentionItem& item, int slot, const RowState (&chunk)[2]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (rows.token(r) >= item.tokens) continue;
      const int64_t at = static_cast<int64_t>(slot) * p.slot_rows + first_row() + 8 * r;
      float* to = p.partial + at * D + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
      if ((lane & 3) == 0) p.partial_ml[at] = make_float2(chunk[r].m, chunk[r].l);
    }
  }

  // Divides, rounds and writes the item's rows. The four lanes of a row exchange words so that each writes 16 bytes.
  QUARTZ_DEVICE void write_result(const AttentionItem& item) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool valid = rows.token(r) < item.tokens;
      const int head = item.head * p.group + rows.head(r), token = item.token + rows.token(r);
      const int64_t batch = p.batched ? item.sequence : 0;
      float scale = 1.0f;
      if (p.sinks != nullptr && valid) {
        scale = fold_row(total[r], p.sinks[head] * p.c_inverse, 1.0f, p.c).before;
      }
      const float inverse = inverse_sum(total[r].l);
      if (valid && p.lse != nullptr && (lane & 3) == 0) {
        p.lse[batch * p.lse_batch + token * p.lse_token + head * p.lse_head] = natural_logsumexp(total[r], p.c);
      }
      T* to = static_cast<T*>(p.out) + batch * p.out_batch + token * p.out_token + head * p.out_head;
      const int me = lane & 3;
#pragma unroll
      for (int b = 0; b < D / 32; ++b) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 4 * (4 * b + i) + 2 * r;
          word[i] = pack<T>(result(__fmul_rn(o[j], scale), inverse), result(__fmul_rn(o[j + 1], scale), inverse));
        }
        // Transposes the 4 x 4 words of four lanes: lane i gets block 4 b + i.
        const bool odd = me & 1, upper = me & 2;
        uint32_t a = __shfl_xor_sync(~0u, odd ? word[0] : word[1], 1),
                 c = __shfl_xor_sync(~0u, odd ? word[2] : word[3], 1);
        const uint32_t x0 = odd ? a : word[0],
                       x1 = odd ? word[1] : a;  // of block 4 b + odd: lanes (even, odd) of my pair
        const uint32_t y0 = odd ? c : word[2], y1 = odd ? word[3] : c;  // of block 4 b + 2 + odd
        const uint32_t z0 = __shfl_xor_sync(~0u, upper ? x0 : y0, 2), z1 = __shfl_xor_sync(~0u, upper ? x1 : y1, 2);
        const uint4 all = upper ? make_uint4(z0, z1, y0, y1) : make_uint4(x0, x1, z0, z1);
        const int column = 8 * (4 * b + me);
        if (valid && column < p.value_size) *reinterpret_cast<uint4*>(to + column) = all;
      }
    }
  }

  QUARTZ_DEVICE void run(uint32_t key_barriers, uint32_t value_barriers, uint32_t query_barriers,
                         const AttentionItem* items) {
    Buffers<L::kStages> keys(key_barriers, 0), value_ring(value_barriers, 0);
    Buffers<L::kQueryBuffers> queries(query_barriers, 0);
    int item_stage = 0;
    place(p.group);
#pragma unroll
    for (int i = 0; i < 32; ++i) probabilities[i] = 0;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
    factor[1] = 1.0f;
    const bool alternate = !kSplitKind && kOverlap && p.alternate;
    if (alternate && warpgroup == 1) arrive_named_barrier(1, 256);
    const uint32_t key0 = row_descriptor(shared + L::kKeys), value0 = value_descriptor(shared + L::kValues);
    constexpr uint32_t kStep = L::kStageBytes >> 4;
    const auto release = [&](auto& ring) {
      if (lane == 0) barrier_arrive(ring.empty_barrier());
      ring.next();
    };
    for (;;) {
      queries.wait_full();
      const AttentionItem& item = items[item_stage];
      item_stage = (item_stage + 1) % L::kItemBuffers;
      if (__shfl_sync(~0u, item.sequence, 0) < 0) break;
      // The same for all lanes, and known to be: they steer the products.
      const int tile_begin = __shfl_sync(~0u, item.tile_begin, 0), tile_end = __shfl_sync(~0u, item.tile_end, 0);
      int low[2], high[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = item.position + rows.token(r);
        high[r] = p.causal ? min(position + 1, item.keys) : item.keys;
        low[r] = kFull && p.window > 0 ? max(0, position + 1 - p.window) : 0;
      }
      const int flags = __shfl_sync(~0u, static_cast<int>(item.flags), 0);
      const bool begins = flags & AttentionItem::kBegins, ends = flags & AttentionItem::kEnds;
      int next_chunk = AttentionChunks::of(tile_begin) + 1, folded = 0, slot = item.slot, accumulate = 0;
      int boundary = AttentionChunks::begin(next_chunk);
      const uint32_t query = row_descriptor(shared + queries.stage * L::kQueryBytes + warpgroup * (64 * D * 2));
      state[0].reset();
      state[1].reset();
      total[0].reset();
      total[1].reset();

      const auto make_probabilities = [&](int tile) {
        if constexpr (kFull) modify(item, tile * kTile, high);
        limit(tile * kTile, low, high);
        softmax();
      };
      // The tiles before `tile` make a whole chunk, whose state is `chunk`.
      const auto finish_chunk = [&](RowState(&chunk)[2]) {
        chunk[0].l = sum_of_lanes(chunk[0].l);
        chunk[1].l = sum_of_lanes(chunk[1].l);
        if (begins) {
          fold_chunk(chunk, folded++ == 0, false);
        } else if constexpr (kSplitKind) {
          write_partial(item, slot++, chunk);
        }
        boundary = AttentionChunks::begin(++next_chunk);
        accumulate = 0;
      };
      const auto values_of = [&](int tile, bool clear) {
        value_ring.wait_full();
        if (clear) clear_values(item, tile, value_ring.stage);
        products_fence();
        values<T, D>(o, probabilities, value0 + value_ring.stage * kStep, accumulate);
        products_commit();
      };

      if constexpr (kOverlap) {
        keys.wait_full();
        products_fence();
        scores<T, D>(s, query, key0 + keys.stage * kStep);
        products_commit();
        products_wait<0>();
        pin(s);
        release(keys);
        make_probabilities(tile_begin);
        round_probabilities();
        for (int tile = tile_begin + 1; tile < tile_end; ++tile) {
          keys.wait_full();
          if (alternate) named_barrier(1 + warpgroup, 256);
          products_fence();
          scores<T, D>(s, query, key0 + keys.stage * kStep);
          products_commit();
          values_of(tile - 1, kFull && tile - 1 == tile_begin);
          if (alternate) arrive_named_barrier(2 - warpgroup, 256);
          products_wait<1>();
          pin(s);
          release(keys);
          const bool starts = tile == boundary;
          RowState chunk[2] = {state[0], state[1]};
          if (starts) {
            state[0].reset();
            state[1].reset();
          }
          make_probabilities(tile);
          products_wait<0>();
          pin(o);
          release(value_ring);
          round_probabilities();
          if (starts) {
            finish_chunk(chunk);
          } else {
            accumulate = 1;
            rescale();
          }
        }
        release(queries);
        values_of(tile_end - 1, true);
        products_wait<0>();
        pin(o);
        release(value_ring);
      } else {
        for (int tile = tile_begin; tile < tile_end; ++tile) {
          keys.wait_full();
          products_fence();
          scores<T, D>(s, query, key0 + keys.stage * kStep);
          products_commit();
          products_wait<0>();
          pin(s);
          release(keys);
          if (tile == tile_end - 1) release(queries);
          if (tile == boundary) {
            finish_chunk(state);
            state[0].reset();
            state[1].reset();
          }
          make_probabilities(tile);
          if (accumulate) rescale();
          round_probabilities();
          values_of(tile, tile == tile_end - 1 || (kFull && tile == tile_begin));
          products_wait<0>();
          pin(o);
          release(value_ring);
          accumulate = 1;
        }
      }

      state[0].l = sum_of_lanes(state[0].l);
      state[1].l = sum_of_lanes(state[1].l);
      fold_chunk(state, folded == 0, true);
      if (kSplitKind && !(begins && ends)) {
        write_partial(item, slot, total);
      } else {
        write_result(item);
      }
    }
    if (alternate && warpgroup == 0) named_barrier(1, 256);  // takes the last arrival of the other warpgroup
  }
};

template <class T, int D, int KIND>
__global__ void __launch_bounds__((Layout<D, KIND <= kSplitFull>::kThreads), 1)
    attention_kernel(const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap key_map,
                     const __grid_constant__ CUtensorMap value_map, const __grid_constant__ Params p) {
  constexpr bool kSplits = KIND <= kSplitFull, kIsFull = KIND == kSplitFull || KIND == kWideFull;
  constexpr bool kTight = D == 256 || kIsFull;  // the consumers need more, and the producer spills a little
  using L = Layout<D, kSplits>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = shared_address(shared_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t keys = shared + L::kBarriers, values = keys + 16 * L::kStages, queries = values + 16 * L::kStages;
  auto* items = reinterpret_cast<AttentionItem*>(shared_memory + L::kItems);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(keys + 8 * i, 1);
      barrier_init(keys + 8 * (L::kStages + i), L::kGroups * 4);
      barrier_init(values + 8 * i, 1);
      barrier_init(values + 8 * (L::kStages + i), L::kGroups * 4);
    }
    for (int i = 0; i < L::kQueryBuffers; ++i) {
      barrier_init(queries + 8 * i, 1);
      barrier_init(queries + 8 * (L::kQueryBuffers + i), L::kGroups * 4);
    }
    barrier_init_done();
  }
  if (threadIdx.x == 32) {
    prefetch_map(key_map);
    prefetch_map(value_map);
    prefetch_map(query_map);
  }
  let_next_kernel_start();
  __syncthreads();
  if (warp >= L::kGroups * 4) {
    if constexpr (!kSplits) give_registers<kTight ? 40 : 56>();
    if (warp == L::kGroups * 4) {
      Producer<D, kSplits, kIsFull> producer{
          p, query_map, key_map, value_map, shared, items, lane, kSplits ? evict_first_policy() : 0, 64 / p.group};
      producer.run(keys, values, queries);
    }
  } else {
    if constexpr (!kSplits) take_registers<kTight ? 232 : 224>();
    Consumer<T, D, KIND> consumer{
        p, shared_memory, shared, kSplits ? 0 : warp / 4, warp % 4, lane, static_cast<int>(threadIdx.x % 128)};
    consumer.run(keys, values, queries, items);
  }
}

// ---------------------------------------------------------------- host

template <class T, int D, int KIND>
void launch_kind(const Maps& maps, const Params& p, int blocks, bool overlap, cudaStream_t stream) {
  using L = Layout<D, KIND <= kSplitFull>;
  const auto kernel = attention_kernel<T, D, KIND>;
  static std::atomic<uint64_t> prepared{0};  // a bit a device
  allow_shared_bytes(kernel, L::kSize, prepared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kSize;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, maps.query, maps.key, maps.value, p), "attention");
}

template <class T, int D>
void launch(Kind kind, const Maps& maps, const Params& p, int blocks, bool overlap, cudaStream_t stream) {
  switch (kind) {
    case kOneRow:
      return launch_kind<T, D, kOneRow>(maps, p, blocks, overlap, stream);
    case kSplit:
      return launch_kind<T, D, kSplit>(maps, p, blocks, overlap, stream);
    case kSplitFull:
      return launch_kind<T, D, kSplitFull>(maps, p, blocks, overlap, stream);
    case kWide:
      return launch_kind<T, D, kWide>(maps, p, blocks, overlap, stream);
    case kWideFull:
      return launch_kind<T, D, kWideFull>(maps, p, blocks, overlap, stream);
  }
}

}  // namespace quartz::kernels::cuda::attention_kernels
