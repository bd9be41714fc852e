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
    if (p.block_table.data == nullptr || (FULL && SPLIT && p.odd_page > 0)) return item.sequence;
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

  // For pages of any size: the warp copies row by row, 16 bytes a lane, into the places that the copy engine would
  // choose. Slow, since it waits for each tile. Only the split kernel has the registers for it.
  QUARTZ_DEVICE void load_rows(const Rows& from, const AttentionItem& item, int tile, uint32_t target,
                               uint32_t barrier) const {
    const int low = max(first_key(item, p) - tile * kTile, 0), high = min(kTile, item.keys - tile * kTile);
    const int row_bytes = from.size * 2;
    for (int row = low; row < high; ++row) {
      const int key = tile * kTile + row;
      const int64_t page = p.block_table[item.sequence * p.table_stride + key / p.odd_page];
      const char* source =
          static_cast<const char*>(from.data) +
          (page * from.block + key % p.odd_page * from.row + item.head / p.heads_per_key * from.head) * 2;
      for (int at = lane * 16; at < L::kColumns * 128; at += 32 * 16) {
        const uint32_t to = target + at / 128 * L::kBoxBytes + row * 128 + ((at % 128) ^ (row % 8 * 16));
        const int bytes = at < row_bytes ? 16 : 0;  // zeros behind the end
        asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source + (bytes > 0 ? at : 0)),
                     "r"(bytes)
                     : "memory");
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    fence_shared_writes();
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }

  QUARTZ_DEVICE void load_tile(const CUtensorMap& map, const Rows& from, const AttentionItem& item, int tile, int page,
                               int begin, uint32_t target, uint32_t barrier) const {
    if (FULL && SPLIT && p.odd_page > 0) {
      load_rows(from, item, tile, target, barrier);
    } else {
      load(map, item, tile, page, begin, target, barrier);
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
    const auto claim = [&] {
      if (shared_work && lane == 0) x = statics + atomicAdd(p.counters, 1);
    };
    // What comes before reads nothing but the plan and the block table.
    const auto begin = [&] {
      if (!first) return;
      first = false;
      wait_for_previous_kernel();
      if (SPLIT) claim();
    };
    for (;;) {
      bool more = true;
      if (first && item.sequence >= 0) {
        // the block's first item, read already
      } else if (SPLIT && own < own_end) {
        item = p.items[own++];
      } else {
        // The split kernel claims its next piece while it works on one; the wide kernel's items are too long for that.
        begin();
        if (!SPLIT) claim();
        x = __shfl_sync(~0u, x, 0);
        more = x < total;
        if (more) {
          item = p.items[x];
          if (SPLIT) claim();
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
      const int slot = key_begin(item, p);
      begin();
      load_queries(item, queries);
      queries.next();
      for (int tile = item.tile_begin; tile <= item.tile_end; ++tile) {
        const int following = page_of(item, tile + 1);
        if (tile < item.tile_end) {
          keys.wait_empty();
          load_tile(key_map, p.keys, item, tile, page, slot, shared + L::kKeys + keys.stage * L::kStageBytes,
                    keys.full_barrier());
          keys.next();
        }
        if (tile > item.tile_begin) {
          values.wait_empty();
          load_tile(value_map, p.values, item, tile - 1, previous, slot,
                    shared + L::kValues + values.stage * L::kStageBytes, values.full_barrier());
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
