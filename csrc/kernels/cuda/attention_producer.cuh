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

  // A tile comes in boxes of 64 columns x 2^box_rows_log2 keys, which lie in one page. Up to 8 boxes have their pages
  // looked up one tile ahead, by a lane each.
  QUARTZ_DEVICE bool few_boxes() const { return p.box_rows_log2 >= 4; }

  // Page and slot of a key.
  QUARTZ_DEVICE int index_of(int key) const {
    return p.block_size_log2 >= 0 ? key >> p.block_size_log2 : key / p.block_size;
  }
  QUARTZ_DEVICE int slot_of(int key) const {
    return p.block_size_log2 >= 0 ? key & (p.block_size - 1) : key % p.block_size;
  }
  QUARTZ_DEVICE int page_at(const AttentionItem& item, int index) const {
    return static_cast<int>(p.block_table[item.sequence * p.table_stride + index]);
  }

  // The page of this lane's slots of a tile (lane < boxes of a tile), 0 where nothing is to be read.
  QUARTZ_DEVICE int page_of(const AttentionItem& item, int tile) const {
    if (p.block_size == 0) return item.sequence;
    const int key = tile * kTile + (lane << p.box_rows_log2);
    const int low = FULL ? first_key(item, p) : 0;
    if (!few_boxes() || lane >= (kTile >> p.box_rows_log2) || tile >= item.tile_end || key >= item.keys ||
        (FULL && key + (1 << p.box_rows_log2) <= low)) {
      return 0;
    }
    return page_at(item, index_of(key));
  }

  QUARTZ_DEVICE void copy(const CUtensorMap& map, uint32_t to, int column, int slot, int head, int page,
                          uint32_t barrier) const {
    if (SPLIT && !p.keep_keys) {
      copy_4d(to, map, column * 64, slot, head, page, barrier, policy);
    } else {
      copy_box(to, map, column * 64, slot, head, page, barrier);
    }
  }

  QUARTZ_DEVICE void load(const CUtensorMap& map, const AttentionItem& item, int tile, int page, int begin,
                          uint32_t target, uint32_t barrier) const {
    const int rows_log2 = p.box_rows_log2, boxes_log2 = 7 - rows_log2;
    const int boxes = 1 << boxes_log2, rows = 1 << rows_log2, head = item.head / p.heads_per_key;
    const int low = FULL ? first_key(item, p) : 0;
    const int used = min(boxes, (item.keys - tile * kTile + rows - 1) >> rows_log2);
    const int skipped = FULL ? min(max(low - tile * kTile, 0) >> rows_log2, used) : 0;
    if (lane == 0) barrier_expect(barrier, (used - skipped) * rows * 128 * L::kColumns);
    if (few_boxes()) {
      const int j = lane & (boxes - 1), column = lane >> boxes_log2;
      const int mine = __shfl_sync(~0u, page, j), key = tile * kTile + j * rows;
      if (column < L::kColumns && j >= skipped && j < used) {
        const int slot = p.block_size == 0 ? begin + key : slot_of(key);
        copy(map, target + column * L::kBoxBytes + j * rows * 128, column, slot, head, mine, barrier);
      }
      return;
    }
    // Pages of a size that is no multiple of 16: many small boxes, each of which is looked up when it is brought.
    __syncwarp();  // the bytes are announced
#pragma unroll 1
    for (int j = skipped + lane; j < used; j += 32) {
      const int key = tile * kTile + j * rows, index = index_of(key);
      const int mine = page_at(item, index), slot = slot_of(key);
#pragma unroll 1
      for (int column = 0; column < L::kColumns; ++column) {
        copy(map, target + column * L::kBoxBytes + j * rows * 128, column, slot, head, mine, barrier);
      }
    }
  }

  __device__ void run(uint32_t key_barriers, uint32_t value_barriers, uint32_t query_barriers) {
    Buffers<L::kStages> keys(key_barriers, 1), values(value_barriers, 1);
    Buffers<L::kQueryBuffers> queries(query_barriers, 1);
    const int grid = gridDim.x, block = blockIdx.x;
    AttentionItem item;
    item.sequence = -1;
    // Of the split kernel the first item is read along with the header: the plan has room for one for each block.
    if (SPLIT) item = p.items[block];
    const int total = p.plan[SPLIT ? kPlanAll : kPlanWide];
    const int statics = SPLIT ? p.plan[kPlanStatic] : grid;
    int own = SPLIT ? p.offsets[block] : 0, own_end = SPLIT ? p.offsets[block + 1] : 0;
    const bool shared_work = total > statics;  // some items go to whoever is free
    int x = total, item_stage = 0;
    bool first = true;
    if (SPLIT && block >= total) item.sequence = -1;
    if (!SPLIT && block < total) item = p.items[block];
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
