// The producer warp: takes items of the plan and has their queries, keys and values copied into shared memory.
#pragma once

#include "kernels/cuda/attention_tiles.cuh"

namespace quartz::kernels::cuda::attention_kernels {

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

}  // namespace quartz::kernels::cuda::attention_kernels
