// The producer warp: takes items of the plan and has their queries, keys and values copied into shared memory.
#pragma once

#include "kernels/cuda/attention_tiles.cuh"

namespace quartz::kernels::cuda::attention_kernels {

// Tiles that the blocks of a cluster bring: those of the item, and the few that only the other block's item has. The
// plan puts their numbers into the slot, which items that are never cut do not need.
struct TileRange {
  int begin, end;
};
QUARTZ_DEVICE TileRange loaded_tiles(const AttentionItem& item, bool pair) {
  if (!pair) return {item.tile_begin, item.tile_end};
  return {item.tile_begin - (item.slot & 0xffff), item.tile_end + (item.slot >> 16)};
}

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
  int rank;  // in the cluster

  // A tile comes in boxes of 64 columns x 2^box_rows_log2 keys, which lie in one page; each block of a cluster brings
  // its share, each lane one box or, of small pages, several.
  struct Place {
    int page, slot;
  };
  QUARTZ_DEVICE int boxes_log2() const { return 7 - p.box_rows_log2 - (L::kBlocks - 1); }
  QUARTZ_DEVICE int first_key_of(const AttentionItem& item) const {
    if (!FULL || p.window == 0) return 0;
    return max(0, item.position - rank * L::kGroups * tokens_per_group + 1 - p.window);
  }
  QUARTZ_DEVICE int box_of(int i) const { return (rank << boxes_log2()) + (i & ((1 << boxes_log2()) - 1)); }
  QUARTZ_DEVICE int column_of(int i) const { return i >> boxes_log2(); }

  // Where the box begins that copy `i` of a tile brings, if that is a key that somebody sees.
  QUARTZ_DEVICE bool find(const AttentionItem& item, int tile, int tile_end, int begin, int i, Place& place) const {
    const int key = tile * kTile + (box_of(i) << p.box_rows_log2);
    if (tile >= tile_end || column_of(i) >= L::kColumns || key >= item.keys ||
        (FULL && key + (1 << p.box_rows_log2) <= first_key_of(item))) {
      return false;
    }
    if (p.block_size == 0) {
      place = {item.sequence, begin + key};
      return true;
    }
    const int index = p.block_size_log2 >= 0
                          ? key >> p.block_size_log2
                          : static_cast<int>(static_cast<uint32_t>(key) / static_cast<uint32_t>(p.block_size));
    place = {static_cast<int>(p.block_table[item.sequence * p.table_stride + index]), key - index * p.block_size};
    return true;
  }
  // Announces the bytes of a tile.
  QUARTZ_DEVICE void expect(const AttentionItem& item, int tile, uint32_t barrier) const {
    const int rows_log2 = p.box_rows_log2, key0 = tile * kTile;
    const int used = min(kTile >> rows_log2, (item.keys - key0 + (1 << rows_log2) - 1) >> rows_log2);
    const int skipped = FULL ? min(max(first_key_of(item) - key0, 0) >> rows_log2, used) : 0;
    if (lane == 0) barrier_expect(barrier, ((used - skipped) << rows_log2) * 128 * L::kColumns);
    __syncwarp();
  }
  QUARTZ_DEVICE void copy(const CUtensorMap& map, const AttentionItem& item, const Place& place, int i, uint32_t target,
                          uint32_t barrier) const {
    const int column = column_of(i), head = item.head / p.heads_per_key;
    const uint32_t to = target + column * L::kBoxBytes + (box_of(i) << p.box_rows_log2) * 128;
    if constexpr (L::kBlocks > 1) {
      copy_box_to_both(to, map, column * 64, place.slot, head, place.page, barrier);
    } else if (SPLIT && !p.keep_keys) {
      copy_4d(to, map, column * 64, place.slot, head, place.page, barrier, policy);
    } else {
      copy_box(to, map, column * 64, place.slot, head, place.page, barrier);
    }
  }
  // Brings a tile; this lane's first box was found before.
  QUARTZ_DEVICE void load(const CUtensorMap& map, const AttentionItem& item, int tile, int tile_end, int begin,
                          bool wanted, const Place& place, uint32_t target, uint32_t barrier) const {
    expect(item, tile, barrier);
    if (wanted) copy(map, item, place, lane, target, barrier);
    if ((L::kColumns << boxes_log2()) <= 32) return;
#pragma unroll 1
    for (int i = lane + 32; i < L::kColumns << boxes_log2(); i += 32) {
      Place other;
      if (find(item, tile, tile_end, begin, i, other)) copy(map, item, other, i, target, barrier);
    }
  }

  // The next of the items that go to whoever is free: the first block of a cluster takes it and tells the other.
  uint32_t mail_phase = 0;
  QUARTZ_DEVICE int share_claim(int x) {
    if constexpr (L::kBlocks == 1) return x;
    const uint32_t full = shared + L::kMail, empty = full + 8, word = full + 16;
    if (rank == 0) {
      barrier_wait(empty, mail_phase ^ 1);
      if (lane == 0) send_word(word, x, full, 1);
    } else {
      if (lane == 0) barrier_expect(full, 4);
      __syncwarp();
      barrier_wait(full, mail_phase);
      x = static_cast<int>(load_shared<uint32_t>(word));
      __syncwarp();
      if (lane == 0) barrier_arrive_at(empty, 0);
    }
    mail_phase ^= 1;
    return x;
  }

  __device__ void run(uint32_t key_barriers, uint32_t value_barriers, uint32_t query_barriers) {
    Buffers<L::kStages> keys(key_barriers, 1), values(value_barriers, 1);
    Buffers<L::kQueryBuffers> queries(query_barriers, 1);
    const int grid = gridDim.x / L::kBlocks, block = blockIdx.x / L::kBlocks;
    AttentionItem item;
    // Of the split kernel the first item is read along with the header: the plan has one for each block.
    if (SPLIT) item = p.items[block];
    const int total = SPLIT ? p.plan[kPlanAll] : p.plan[kPlanWide] * (2 / L::kBlocks);
    const int statics = SPLIT ? p.plan[kPlanStatic] : grid;
    int own = SPLIT ? p.offsets[block] : 0, own_end = SPLIT ? p.offsets[block + 1] : 0;
    const bool shared_work = total > statics;  // some items go to whoever is free
    int x = total, item_stage = 0;
    bool first = true;
    if (block >= total) {
      item.sequence = -1;
      own_end = own;
    } else if (!SPLIT) {
      item = p.items[block * L::kBlocks + rank];
    }
    const auto claim = [&] {
      if (shared_work && rank == 0 && lane == 0) x = statics + atomicAdd(p.counters, 1);
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
        if (shared_work) x = share_claim(x);
        more = x < total;
        if (more) {
          item = p.items[x * L::kBlocks + rank];
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
      const TileRange tiles = loaded_tiles(item, L::kBlocks > 1);
      const int slot = p.key_begin != nullptr ? p.key_begin[item.sequence] : 0;
      Place place{}, previous{};
      bool wanted = find(item, tiles.begin, tiles.end, slot, lane, place), previous_wanted = false;
      begin();
      for (int tile = tiles.begin; tile <= tiles.end; ++tile) {
        if (tile < tiles.end) {
          keys.wait_empty();
          load(key_map, item, tile, tiles.end, slot, wanted, place, shared + L::kKeys + keys.stage * L::kStageBytes,
               keys.full_barrier());
          keys.next();
          if (tile == tiles.begin) {  // behind the keys, which are larger
            load_queries(item, queries);
            queries.next();
          }
        }
        Place next{};
        const bool next_wanted = find(item, tile + 1, tiles.end, slot, lane, next);
        if (tile > tiles.begin) {
          values.wait_empty();
          load(value_map, item, tile - 1, tiles.end, slot, previous_wanted, previous,
               shared + L::kValues + values.stage * L::kStageBytes, values.full_barrier());
          values.next();
        }
        previous = place;
        previous_wanted = wanted;
        place = next;
        wanted = next_wanted;
      }
    }
    begin();
    if (shared_work && rank == 0 && lane == 0) {  // the last block leaves the counters as it found them
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
