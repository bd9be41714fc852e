// The planner of attention_plan.h, for a team of threads: one on the host, a block of them on the GPU. Every phase is a
// loop over sequences, units or processors that the team's threads share; a barrier stands between phases.
#pragma once

#include "kernels/attention_plan.h"

// The planner runs once, mostly from a cold instruction cache: its code is kept small, without inlining of what is
// called in many places and without unrolling.
#ifdef __CUDACC__
#define QUARTZ_PLANNER __device__
#define QUARTZ_PLANNER_CALL __device__ __noinline__
#define QUARTZ_PLANNER_LOOP _Pragma("unroll 1")
#else
#define QUARTZ_PLANNER
#define QUARTZ_PLANNER_CALL
#define QUARTZ_PLANNER_LOOP
#endif

namespace quartz::kernels {

// Team: rank(), size(), sync(), first(from, predicate): the least number that it holds for; scan(int32_t* counts, n)
// (exclusive, in place, counts[n] becomes the sum; with barriers).
template <class Team>
class AttentionPlanner {
 public:
  QUARTZ_PLANNER AttentionPlanner(const Team& team, const AttentionPlanInput& input, const AttentionPlanRoom& room,
                                  int32_t* words, int32_t* scratch)
      : team_(team), in_(input), room_(room), words_(words), count_(room.sequences) {
    int32_t* at = scratch;
    const auto take = [&](int64_t n) {
      int32_t* const taken = at;
      at += n;
      return taken;
    };
    sums_ = take(8);
    token_ = take(count_ + 2);
    queries_ = take(count_ + 2);
    keys_ = take(count_ + 2);
    tiles_ = take(count_ + 2);
    order_ = take(count_ + 2);
    split_begin_ = take(count_ + 2);
    wide_begin_ = take(count_ + 2);
    kind_ = take(count_ + 2);
    cut_ = take(room.split_units + 2);
    slot_ = take(room.split_units + 2);
    fold_ = take(room.split_units + 2);
    piece_ = take(room.split_units + 2);
    wide_tiles_ = take(room.wide);
    blocks_ = reinterpret_cast<Unit*>(take(int64_t{8} * (room.split_units / input.heads)));
    items_ = reinterpret_cast<AttentionItem*>(words + room.items_at());
    wide_ = reinterpret_cast<AttentionItem*>(words + room.wide_at());
    folds_ = reinterpret_cast<AttentionFold*>(words + room.folds_at());
  }

  QUARTZ_PLANNER void run() {
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < 16; i += team_.size()) words_[i] = 0;
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < 8; i += team_.size()) sums_[i] = 0;
    read_lengths();
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i <= in_.processors; i += team_.size()) words_[room_.offsets_at() + i] = 0;
    team_.sync();
    if (room_.wide == 0 && few_units()) return;
    classify();
    sort_sequences();
    plan_wide();
    plan_split();
  }

 private:
  using Chunks = AttentionChunks;
  enum SequenceKind { kNothing, kSplit, kWide, kEither };
  enum Sum { kWideTiles, kLongest, kSplitTiles, kTiles };

  struct Sequence {
    int token, queries, keys, position;
  };
  struct Unit {
    int sequence, head, token, tokens, position, keys, first, last;  // tiles
    QUARTZ_PLANNER int tiles() const { return last - first; }
  };

  static QUARTZ_PLANNER int lower(int a, int b) { return a < b ? a : b; }
  static QUARTZ_PLANNER int higher(int a, int b) { return a > b ? a : b; }
  static QUARTZ_PLANNER int clamp(int64_t x, int64_t low, int64_t high) {
    return static_cast<int>(x < low ? low : x > high ? high : x);
  }
  QUARTZ_PLANNER int split_step() const { return room_.split_tokens; }
  QUARTZ_PLANNER int wide_step() const { return 2 * (64 / in_.group); }

  // Lengths out of bounds are brought within: on the GPU nobody can report them. The rows that belong to no sequence
  // are one without keys, so that they become zeros.
  QUARTZ_PLANNER void read_lengths() {
    if (in_.query_starts.data == nullptr) return;
    QUARTZ_PLANNER_LOOP
    for (int s = team_.rank(); s < count_; s += team_.size()) {
      const bool none = s == in_.sequences;
      const int begin = clamp(in_.query_starts[s], 0, in_.queries);
      const int end = none ? in_.queries : clamp(in_.query_starts[s + 1], begin, in_.queries);
      token_[s] = begin;
      queries_[s] = end - begin;
      keys_[s] = none ? 0 : clamp(in_.key_counts[s], 0, in_.keys);
    }
  }
  QUARTZ_PLANNER Sequence sequence(int s) const {
    if (in_.query_starts.data == nullptr) {
      const int begin = in_.key_begin.data != nullptr ? clamp(in_.key_begin[s], -kMostDropped, in_.keys) : 0;
      const int end = in_.key_end.data != nullptr ? clamp(in_.key_end[s], 0, in_.keys) : in_.keys;
      return {0, in_.queries, higher(0, end - begin), in_.query_offset - begin};
    }
    return {token_[s], queries_[s], keys_[s], s == in_.sequences ? 0 : keys_[s] - queries_[s]};
  }

  QUARTZ_PLANNER_CALL Unit unit_of(int s, int block, int head, int step) const {
    const Sequence of = sequence(s);
    Unit u{
        s, head, of.token + block * step, lower(step, of.queries - block * step), of.position + block * step, of.keys,
        0, 1};
    int end = of.keys, low = 0;
    if (in_.causal) end = lower(end, u.position + u.tokens);
    if (in_.window > 0) low = higher(0, u.position + 1 - in_.window);
    u.last = higher(1, (end + kAttentionTile - 1) / kAttentionTile);
    u.first = lower(low / kAttentionTile, u.last - 1);
    return u;
  }

  static QUARTZ_PLANNER int blocks(int queries, int step) { return (queries + step - 1) / step; }

  // Which kernel takes each sequence. Large ones are split over their keys, too, if there are too few of them to fill
  // the GPU otherwise: the times compared were measured on an H200 at head size 128.
  QUARTZ_PLANNER void classify() {
    QUARTZ_PLANNER_LOOP
    for (int s = team_.rank(); s < count_; s += team_.size()) {
      const Sequence of = sequence(s);
      const int n = blocks(of.queries, split_step());
      tiles_[s] = of.queries > 0 ? unit_of(s, n - 1, 0, split_step()).tiles() : 0;
      if (room_.split_units == 0 || (s == in_.sequences && room_.wide > 0)) {  // no room, or rows of no sequence
        kind_[s] = of.queries == 0 ? kNothing : kWide;
        continue;
      }
      kind_[s] = of.queries == 0                                   ? kNothing
                 : of.queries <= split_step() || !in_.wide_allowed ? kSplit
                 : in_.wide_always                                 ? kWide
                                                                   : kEither;
      if (kind_[s] != kEither) continue;
      // The mean of the first and the last block, for all of them.
      const int mean = (unit_of(s, 0, 0, split_step()).tiles() + tiles_[s] + 1) / 2;
      team_.add(sums_ + kWideTiles, saturated(int64_t{mean} * blocks(of.queries, wide_step()) * in_.heads));
      team_.add(sums_ + kSplitTiles, saturated(int64_t{mean} * n * in_.heads));
      team_.max(sums_ + kLongest, tiles_[s]);
    }
    team_.sync();
    const float wide = sums_[kWideTiles] / static_cast<float>(in_.processors);
    const float longest = static_cast<float>(sums_[kLongest]);
    const float split = 0.78f * (sums_[kSplitTiles] / static_cast<float>(in_.processors)) + 6.0f;
    const bool prefer_wide = (wide > longest ? wide : longest) <= split;
    QUARTZ_PLANNER_LOOP
    for (int s = team_.rank(); s < count_; s += team_.size()) {
      if (kind_[s] == kEither) kind_[s] = prefer_wide ? kWide : kSplit;
    }
    team_.sync();
  }
  static QUARTZ_PLANNER int saturated(int64_t x) { return clamp(x, 0, 1 << 24); }

  // order_: the sequences by their tiles, descending; equal ones ascending.
  QUARTZ_PLANNER void sort_sequences() {
    const bool same = in_.query_starts.data == nullptr;
    QUARTZ_PLANNER_LOOP
    for (int s = team_.rank(); s < count_; s += team_.size()) {
      int rank = same ? s : 0;
      QUARTZ_PLANNER_LOOP
      for (int other = 0; !same && other < count_; ++other) {
        rank += tiles_[other] > tiles_[s] || (tiles_[other] == tiles_[s] && other < s) ? 1 : 0;
      }
      order_[rank] = s;
    }
    team_.sync();
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < count_; i += team_.size()) {
      const int s = order_[i], queries = sequence(s).queries;
      split_begin_[i] = kind_[s] == kSplit ? blocks(queries, split_step()) * in_.heads : 0;
      wide_begin_[i] = kind_[s] == kWide ? blocks(queries, wide_step()) * in_.heads : 0;
    }
    team_.scan(split_begin_, count_);
    team_.scan(wide_begin_, count_);
  }

  // The last i with begin[i] <= x.
  static QUARTZ_PLANNER_CALL int find(const int32_t* begin, int n, int x) {
    int low = 0, high = n;  // begin[low] <= x < begin[high]
    QUARTZ_PLANNER_LOOP
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (begin[middle] <= x) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  // The tiles of a split unit are the same for all heads, so that only one is kept for them.
  QUARTZ_PLANNER Unit make_block(int block) const {
    const int i = find(split_begin_, count_, block * in_.heads);
    return unit_of(order_[i], block - split_begin_[i] / in_.heads, 0, split_step());
  }
  QUARTZ_PLANNER Unit split_unit(int u) const {
    Unit unit = blocks_[u / in_.heads];
    unit.head = u % in_.heads;
    return unit;
  }
  // Of many: the blocks of one head after another, the longest first, so that few keys are in use at a time.
  QUARTZ_PLANNER_CALL Unit wide_unit(int u) const {
    const int i = find(wide_begin_, count_, u), rest = u - wide_begin_[i], s = order_[i];
    const int n = (wide_begin_[i + 1] - wide_begin_[i]) / in_.heads;
    return unit_of(s, n - 1 - rest % n, rest / n, wide_step());
  }

  QUARTZ_PLANNER_CALL AttentionItem item(const Unit& u, int begin, int end, int slot) const {
    AttentionItem item;
    item.sequence = u.sequence;
    item.head = static_cast<int16_t>(u.head);
    item.tokens = static_cast<uint8_t>(u.tokens);
    item.flags = static_cast<uint8_t>((begin == u.first ? AttentionItem::kBegins : 0) |
                                      (end == u.last ? AttentionItem::kEnds : 0));
    item.token = u.token;
    item.position = u.position;
    item.keys = u.keys;
    item.tile_begin = begin;
    item.tile_end = end;
    item.slot = slot;
    return item;
  }

  QUARTZ_PLANNER void plan_wide() {
    const int n = lower(wide_begin_[count_], room_.wide);
    if (team_.rank() == 0) words_[kPlanWide] = n;
    if (n == 0) return;
    if (n >= kManyWide) {
      QUARTZ_PLANNER_LOOP
      for (int u = team_.rank(); u < n; u += team_.size()) {
        const Unit unit = wide_unit(u);
        wide_[u] = item(unit, unit.first, unit.last, 0);
      }
      return;
    }
    QUARTZ_PLANNER_LOOP
    for (int u = team_.rank(); u < n; u += team_.size()) wide_tiles_[u] = wide_unit(u).tiles();
    team_.sync();
    QUARTZ_PLANNER_LOOP
    for (int u = team_.rank(); u < n; u += team_.size()) {
      int rank = 0;
      QUARTZ_PLANNER_LOOP
      for (int other = 0; other < n; ++other) {
        rank += wide_tiles_[other] > wide_tiles_[u] || (wide_tiles_[other] == wide_tiles_[u] && other < u) ? 1 : 0;
      }
      const Unit unit = wide_unit(u);
      wide_[rank] = item(unit, unit.first, unit.last, 0);
    }
  }

  // The boundary of a chunk near a tile; the lower one if `down`.
  static QUARTZ_PLANNER_CALL int boundary(const Unit& u, int tile, bool down) {
    const int chunk = Chunks::of(tile);
    const int begin = higher(Chunks::begin(chunk), u.first), end = lower(Chunks::begin(chunk + 1), u.last);
    return down || (tile - begin) * 2 <= end - begin ? begin : end;
  }

  QUARTZ_PLANNER void plan_split() {
    const int n = lower(split_begin_[count_], room_.split_units);
    if (n == 0) return;
    const int count = n / in_.heads;
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < count; i += team_.size()) keep_block(i, make_block(i));
    team_.sync();
    if (n <= in_.processors && one_wave(count)) return;
    if (n > in_.processors && room_.folds == 0) return whole_units(n);
    team_.sync();
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < count; i += team_.size()) team_.add(sums_ + kTiles, piece_[i]);
    team_.sync();
    shared_tails(n, int64_t{sums_[kTiles]} * in_.heads);
  }
  QUARTZ_PLANNER void keep_block(int i, const Unit& block) {
    blocks_[i] = block;
    piece_[i] = block.tiles();
    slot_[i] = chunks_of(block);
  }

  // The usual step of decoding: few sequences, none of them for the wide kernel. Their order does not matter, and each
  // thread walks along all of them, so that few barriers are needed.
  QUARTZ_PLANNER bool few_units() {
    constexpr int kFew = 64;
    if (count_ > kFew) return false;
    const int most = lower(in_.processors, room_.split_units);
    int count = 0;
    QUARTZ_PLANNER_LOOP
    for (int s = 0; s < count_; ++s) {
      const int of_sequence = blocks(sequence(s).queries, split_step());
      if (s % team_.size() == team_.rank() && (count + of_sequence) * in_.heads <= most) {
        QUARTZ_PLANNER_LOOP
        for (int i = 0; i < of_sequence; ++i) keep_block(count + i, unit_of(s, i, 0, split_step()));
      }
      count += of_sequence;
      if (count * in_.heads > most) return false;
    }
    team_.sync();
    return one_wave(count);
  }

  static QUARTZ_PLANNER int chunks_of(const Unit& u) { return Chunks::of(u.last - 1) - Chunks::of(u.first) + 1; }

  // Few units: each is cut into equal parts, one for each processor, whose tiles are as few as that permits.
  QUARTZ_PLANNER int parts_of(int block, int target) const {
    return room_.folds == 0 ? 1 : lower((piece_[block] + target - 1) / target, slot_[block]);
  }
  // Where part i of `parts` begins; the first is not empty.
  static QUARTZ_PLANNER_CALL int part_begin(const Unit& u, int i, int parts) {
    if (i <= 0) return u.first;
    if (i >= parts) return u.last;
    if (parts == chunks_of(u)) return Chunks::begin(Chunks::of(u.first) + i);
    const int ideal = u.first + u.tiles() * i / parts;  // no overflow: at most 2^23 tiles and a part for each processor
    return higher(boundary(u, ideal, false), Chunks::begin(Chunks::of(u.first) + 1));
  }
  QUARTZ_PLANNER bool one_wave(int count) {
    int tiles = 0;  // few units: no overflow
    QUARTZ_PLANNER_LOOP
    for (int i = 0; i < count; ++i) tiles += piece_[i];
    tiles *= in_.heads;
    const int least = higher(1, (tiles + in_.processors - 1) / in_.processors);
    // With the longest as the target each unit has one part.
    const int target = team_.first(least, [&](int target) {
      int parts = 0;
      QUARTZ_PLANNER_LOOP
      for (int i = 0; i < count; ++i) parts += parts_of(i, target);
      return parts * in_.heads <= in_.processors;
    });
    if (room_.folds > 0 && target > least + least / 4 + 4) return false;  // some processors would have little to do

    int32_t* const offsets = words_ + room_.offsets_at();
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i <= in_.processors; i += team_.size()) {
      offsets[i] = in_.processors;
      if (i == in_.processors) {
        words_[kPlanStatic] = words_[kPlanAll] = i;
        break;
      }
      items_[i].sequence = -1;
      int before = 0, slots = 0;  // parts and slots of the blocks before
      QUARTZ_PLANNER_LOOP
      for (int b = 0; b < count; ++b) {
        const int parts = parts_of(b, target), of_head = parts > 1 ? slot_[b] + 1 : 0;
        if (i < before + parts * in_.heads) {
          write_part(b, (i - before) / parts, (i - before) % parts, i, parts, slots, of_head);
          break;
        }
        before += parts * in_.heads;
        slots += of_head * in_.heads;
      }
    }
    return true;
  }
  // Part `part` of a unit as item i. The first also writes the unit's fold.
  QUARTZ_PLANNER_CALL void write_part(int block, int head, int part, int i, int parts, int slots, int of_head) {
    Unit unit = blocks_[block];
    unit.head = head;
    if (slots + of_head * in_.heads > room_.slots) parts = 1;
    const int from = part_begin(unit, part, parts), to = part_begin(unit, part + 1, parts);
    const int cut = part == 0 ? to : part_begin(unit, 1, parts), first_slot = slots + head * of_head;
    if (from < to) {
      items_[i] = item(unit, from, to,
                       parts == 1  ? 0
                       : part == 0 ? first_slot
                                   : first_slot + 1 + Chunks::of(from) - Chunks::of(cut));
    }
    if (part > 0 || room_.folds == 0) return;
    const int u = block * in_.heads + head;
    if (cut < unit.last) {
      folds_[u] = {unit.sequence, unit.head,  unit.token,
                   unit.tokens,   first_slot, 2 + Chunks::of(unit.last - 1) - Chunks::of(cut),
                   {0, 0}};
      team_.max(words_ + kPlanFolds, u + 1);
    } else {
      folds_[u] = {unit.sequence, unit.head, unit.token, 0, 0, 0, {0, 0}};  // not cut
    }
  }

  // More units than processors, none of which may be cut: they are dealt in turns, back and forth.
  QUARTZ_PLANNER void whole_units(int n) {
    const int processors = in_.processors, rounds = (n + processors - 1) / processors;
    const int rest = n - (rounds - 1) * processors;  // of the last round
    const auto before = [&](int processor) {         // items behind the first of the processors before this one
      const int of_last = rounds % 2 == 1 ? lower(processor, rest) : higher(0, processor - (processors - rest));
      return processor * (rounds - 2) + of_last;
    };
    QUARTZ_PLANNER_LOOP
    for (int u = team_.rank(); u < n; u += team_.size()) {
      const int round = u / processors, place = u % processors;
      const int processor = round % 2 == 0 ? place : processors - 1 - place;
      const Unit unit = split_unit(u);
      items_[round == 0 ? processor : processors + before(processor) + round - 1] =
          item(unit, unit.first, unit.last, 0);
    }
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i <= processors; i += team_.size()) {
      words_[room_.offsets_at() + i] = processors + before(i);
    }
    if (team_.rank() == 0) words_[kPlanStatic] = words_[kPlanAll] = n;
  }

  // Gives slots and folds to the units with cut_ < last, as far as there is room; the others become whole again.
  QUARTZ_PLANNER void give_slots(int n) {
    QUARTZ_PLANNER_LOOP
    for (int u = team_.rank(); u < n; u += team_.size()) {
      const Unit unit = split_unit(u);
      const bool cut = cut_[u] < unit.last;
      slot_[u] = cut ? 2 + Chunks::of(unit.last - 1) - Chunks::of(cut_[u]) : 0;
      fold_[u] = cut ? 1 : 0;
    }
    team_.scan(slot_, n);
    team_.scan(fold_, n);
    QUARTZ_PLANNER_LOOP
    for (int u = team_.rank(); u < n; u += team_.size()) {
      const int slots = slot_[u + 1] - slot_[u];
      if (slots == 0) continue;
      const Unit unit = split_unit(u);
      if (slot_[u + 1] > room_.slots || fold_[u + 1] > room_.folds) {
        cut_[u] = unit.last;
      } else {
        folds_[fold_[u]] = {unit.sequence, unit.head, unit.token, unit.tokens, slot_[u], slots, {0, 0}};
        team_.max(words_ + kPlanFolds, fold_[u + 1]);
      }
    }
    team_.sync();
  }
  QUARTZ_PLANNER_CALL int slot_of(int u, const Unit& unit, int begin) const {
    if (cut_[u] >= unit.last) return 0;
    return begin == unit.first ? slot_[u] : slot_[u] + 1 + Chunks::of(begin) - Chunks::of(cut_[u]);
  }

  // The units, longest first, go to the processors in turns, back and forth. A processor keeps what fits
  // into its room, the last of it cut at a boundary; the rest is shared in pieces by those that finish first.
  QUARTZ_PLANNER int snake(int processor, int round) const {
    return round * in_.processors + (round % 2 == 0 ? processor : in_.processors - 1 - processor);
  }
  QUARTZ_PLANNER void shared_tails(int n, int64_t tiles) {
    int32_t* const offsets = words_ + room_.offsets_at();
    const float share = static_cast<float>(tiles) / static_cast<float>(in_.processors);
    const float room = (share < 24.0f ? 1.0f : 0.95f) * share;
    const int rounds = (n + in_.processors - 1) / in_.processors;
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < in_.processors; i += team_.size()) {
      float load = 0.0f;
      QUARTZ_PLANNER_LOOP
      for (int round = 0; round < rounds; ++round) {
        const int u = snake(i, round);
        if (u >= n) continue;
        const Unit unit = split_unit(u);
        const float left = room - load;
        int end = unit.last;
        if (static_cast<float>(unit.tiles()) > left + 1.0f) {
          end = left > 0.0f ? boundary(unit, unit.first + static_cast<int>(left), true) : unit.first;
        }
        piece_[u] = end > unit.first ? 1 : 0;  // the processor keeps a prefix
        cut_[u] = end;
        if (end == unit.first) {  // all of it is shared: cut unless it is small
          cut_[u] = static_cast<float>(unit.tiles()) > 0.05f * share ? piece_end(unit, unit.first) : unit.last;
        }
        load += static_cast<float>(end - unit.first);
      }
    }
    team_.sync();
    give_slots(n);
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < in_.processors; i += team_.size()) {
      int count = 0;
      QUARTZ_PLANNER_LOOP
      for (int round = 0; round < rounds; ++round) {
        const int u = snake(i, round);
        if (u < n && piece_[u] != 0) ++count;
      }
      offsets[i] = count > 1 ? count - 1 : 0;
    }
    team_.scan(offsets, in_.processors);
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i < in_.processors; i += team_.size()) {
      int count = 0;
      QUARTZ_PLANNER_LOOP
      for (int round = 0; round < rounds; ++round) {
        const int u = snake(i, round);
        if (u >= n || piece_[u] == 0) continue;
        const Unit unit = split_unit(u);
        const int at = count == 0 ? i : in_.processors + offsets[i] + count - 1;
        items_[at] = item(unit, unit.first, cut_[u], slot_of(u, unit, unit.first));
        ++count;
      }
      if (count == 0) items_[i].sequence = -1;
    }
    team_.sync();
    // The pieces: what lies behind a kept prefix, or all of a unit. Processors without a unit begin with one.
    idle_begin_ = lower(n, in_.processors);
    const int statics = in_.processors + offsets[in_.processors];
    for (;;) {
      QUARTZ_PLANNER_LOOP
      for (int u = team_.rank(); u < n; u += team_.size()) fold_[u] = pieces(u, split_unit(u), -1, 0);
      team_.scan(fold_, n);
      if (statics + fold_[n] - idle() <= room_.items) break;
      piece_tiles_ *= 4;  // too many for the room
      team_.sync();
    }
    QUARTZ_PLANNER_LOOP
    for (int u = team_.rank(); u < n; u += team_.size()) pieces(u, split_unit(u), fold_[u], statics);
    team_.sync();
    QUARTZ_PLANNER_LOOP
    for (int i = team_.rank(); i <= in_.processors; i += team_.size()) offsets[i] += in_.processors;
    if (team_.rank() == 0) {
      words_[kPlanStatic] = statics;
      words_[kPlanAll] = statics + higher(0, fold_[n] - idle());
    }
  }
  QUARTZ_PLANNER_CALL int piece_end(const Unit& unit, int begin) const {
    if (begin + piece_tiles_ >= unit.last) return unit.last;
    return lower(unit.last, higher(boundary(unit, begin + piece_tiles_, false), Chunks::begin(Chunks::of(begin) + 1)));
  }
  QUARTZ_PLANNER int idle() const { return in_.processors - idle_begin_; }
  // Counts the pieces of a unit, and writes them if `at`, the number of pieces before them, is not negative.
  QUARTZ_PLANNER_CALL int pieces(int u, const Unit& unit, int at, int statics) {
    int count = 0;
    int begin = piece_[u] != 0 ? cut_[u] : unit.first;
    QUARTZ_PLANNER_LOOP
    while (begin < unit.last) {
      const int end = begin == unit.first ? cut_[u] : piece_end(unit, begin);
      if (at >= 0) {
        const int index = at + count;
        items_[index < idle() ? idle_begin_ + index : statics + index - idle()] =
            item(unit, begin, end, slot_of(u, unit, begin));
      }
      ++count;
      begin = end;
    }
    return count;
  }

  static constexpr int kManyWide = 1024, kMostDropped = 1 << 29;
  int piece_tiles_ = 4, idle_begin_ = 0;

  const Team& team_;
  const AttentionPlanInput& in_;
  const AttentionPlanRoom& room_;
  int32_t* words_;
  int count_;                                                     // of sequences, with that of the rows behind them
  int32_t *sums_, *token_, *queries_, *keys_;                     // for each sequence
  int32_t *tiles_, *order_, *split_begin_, *wide_begin_, *kind_;  // for each sequence
  int32_t *cut_, *slot_, *fold_, *piece_, *wide_tiles_;           // for each unit
  Unit* blocks_;                                                  // split units of the first head
  AttentionItem *items_, *wide_;
  AttentionFold* folds_;
};

}  // namespace quartz::kernels
