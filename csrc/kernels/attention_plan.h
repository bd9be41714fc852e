// How the work of one attention call on CUDA is divided among the multiprocessors. The plan depends on lengths alone,
// so one plan serves every layer of a step. It changes speed, never results: it cuts sequences at the boundaries of
// chunks only, which are part of the numerics (cuda/attention_numerics.cuh).
//
// A unit is one key-value head of one sequence with a block of consecutive query tokens; its rows are tokens x query
// heads. Sequences of many rows go to the wide kernel (128 rows a unit), which takes each unit whole, longest first.
// The others go to the split kernel (64 rows a unit). There a unit may be cut:
// its first item folds a prefix of its chunks, each other chunk is written out, and a second small kernel folds them in
// order.
//
// The plan is made where the lengths are: by one block of threads on the GPU, so that nothing waits for the host and a
// captured graph plans anew at each replay, or by one thread of the host.
#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/dtype.h"

namespace quartz::kernels {

constexpr int kAttentionTile = 128;  // keys

// The chunks of the key axis: 4 of 2 tiles, 14 of 4, then 8 for ever.
struct AttentionChunks {
  static constexpr int kShort = 4, kShortTiles = 2, kMiddle = 14, kMiddleTiles = 4, kLongTiles = 8;
  static constexpr int kMiddleBegin = kShort * kShortTiles, kLongBegin = kMiddleBegin + kMiddle * kMiddleTiles;
  // First tile of a chunk.
  static constexpr QUARTZ_HD int begin(int chunk) {
    return chunk <= kShort             ? chunk * kShortTiles
           : chunk <= kShort + kMiddle ? kMiddleBegin + (chunk - kShort) * kMiddleTiles
                                       : kLongBegin + (chunk - kShort - kMiddle) * kLongTiles;
  }
  // Chunk of a tile.
  static constexpr QUARTZ_HD int of(int tile) {
    return tile < kMiddleBegin ? tile / kShortTiles
           : tile < kLongBegin ? kShort + (tile - kMiddleBegin) / kMiddleTiles
                               : kShort + kMiddle + (tile - kLongBegin) / kLongTiles;
  }
};

// Tiles [tile_begin, tile_end) of one unit.
struct alignas(32) AttentionItem {
  enum Flags : uint8_t { kBegins = 1, kEnds = 2 };  // holds the unit's first tile, its last tile
  int32_t sequence;                                 // -1: nothing
  int16_t head;                                     // block of query heads
  uint8_t tokens, flags;
  int32_t token;     // row of the unit's first query
  int32_t position;  // key position of that query
  int32_t keys, tile_begin, tile_end;
  int32_t slot;  // of the first partial result that it writes
};

// Slots [slot, slot + slots) hold a unit's folded prefix and then its other chunks in order. No slots: nothing to fold.
struct alignas(32) AttentionFold {
  int32_t sequence, head, token, tokens, slot, slots, unused[2];
};

// Where the lengths come from, and what the plan may be.
struct AttentionPlanInput {
  Indices query_starts, key_counts;  // as in Attention; null: every sequence has `queries` and `keys`
  Indices key_begin, key_end;        // dense: as in Attention, or null
  int32_t sequences;
  int32_t queries, keys;  // ragged: all rows of queries, and the most keys that a sequence can have
  int32_t query_offset;   // dense: position of the first query
  int32_t most_queries;   // ragged: of one sequence, if known, else 0
  int32_t group;          // query heads of a unit
  int32_t heads;          // units for each block of tokens
  int32_t window;         // 0: none
  int32_t processors;
  bool causal;
  bool wide_allowed;  // else everything goes to the split kernel
  bool wide_always;   // what has more rows than a split unit goes to the wide kernel
};

// Room for a plan, known without the lengths: bounds from the numbers of sequences and rows.
struct AttentionPlanRoom {
  int32_t split_units, items, wide, folds, slots;
  int32_t split_tokens;  // most tokens of a split unit
  int32_t slot_rows;     // rows of a partial result
  int32_t most_slots;    // of one fold
  int32_t sequences, processors;
  bool keys_shared;  // several split units may read the same keys

  // In 32-bit words: [16: header][offset of each processor's items][items][wide items][folds][scratch]
  QUARTZ_HD int64_t offsets_at() const { return 16; }
  QUARTZ_HD int64_t items_at() const { return 16 + (processors + 1 + 7) / 8 * 8; }
  QUARTZ_HD int64_t wide_at() const { return items_at() + int64_t{8} * items; }
  QUARTZ_HD int64_t folds_at() const { return wide_at() + int64_t{8} * wide; }
  QUARTZ_HD int64_t scratch_at() const { return folds_at() + int64_t{8} * folds; }
  QUARTZ_HD int64_t scratch() const {
    return 8 + int64_t{8} * (sequences + 2) + int64_t{12} * (split_units + 2) + wide;
  }
  QUARTZ_HD int64_t words() const { return scratch_at() + scratch(); }
};
// Words of the header. The counters are for the kernels, which leave them at zero.
enum AttentionPlanHeader { kPlanStatic, kPlanAll, kPlanWide, kPlanFolds, kPlanCounters = 8 };

// Query heads of a unit: those of a key-value head, or the largest divisor of their number up to 64.
int attention_group(int64_t query_heads, int64_t key_heads);
// Also decides, where that needs no lengths, which kernels there will be work for, and notes it in `input`.
AttentionPlanRoom attention_plan_room(AttentionPlanInput& input);
// On this thread; the lengths are in host memory.
void plan_attention(const AttentionPlanInput& input, const AttentionPlanRoom& room, int32_t* words);

}  // namespace quartz::kernels
