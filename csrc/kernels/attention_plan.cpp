#include "kernels/attention_plan.h"

#include <algorithm>

#include "kernels/attention_planner.h"

namespace quartz::kernels {
namespace {

// Rows of partial results that a call may use at most (128 MB at head size 128); beyond, units stay whole.
constexpr int64_t kMostPartialRows = 262144;
// Units of so many keys are not cut where there is one for each processor.
constexpr int kShortKeys = 1024;

struct OneThread {
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  void add(int32_t* to, int32_t value) const { *to += value; }
  void max(int32_t* to, int32_t value) const { *to = std::max(*to, value); }
  template <class Predicate>
  int first(int from, const Predicate& holds) const {
    while (!holds(from)) ++from;
    return from;
  }
  void scan(int32_t* counts, int n) const {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) {
      const int32_t count = counts[i];
      counts[i] = sum;
      sum += count;
    }
    counts[n] = sum;
  }
};

int64_t blocks(int64_t tokens, int64_t step) { return (tokens + step - 1) / step; }

}  // namespace

int attention_group(int64_t query_heads, int64_t key_heads) {
  const int64_t heads = query_heads / key_heads;
  for (int64_t group = std::min<int64_t>(heads, 64); group > 1; --group) {
    if (heads % group == 0) return static_cast<int>(group);
  }
  return 1;
}

AttentionPlanRoom attention_plan_room(AttentionPlanInput& input) {
  const bool ragged = input.query_starts.data != nullptr;
  const int64_t step = 64 / input.group, wide_step = 2 * step, sequences = input.sequences, heads = input.heads;
  const int64_t rows = ragged ? input.queries : sequences * input.queries;
  // The most queries of one sequence. As many rows as sequences is decoding; should a sequence have more rows than its
  // share after all, it has more units.
  int64_t most = ragged ? input.most_queries : input.queries;
  if (ragged && most <= 0) most = rows == sequences ? 1 : std::max<int64_t>(rows - sequences + 1, 1);
  AttentionPlanRoom room{};
  room.sequences = input.sequences + (ragged ? 1 : 0);  // the rows that belong to none are planned like a sequence
  room.processors = input.processors;
  room.split_tokens = static_cast<int32_t>(std::max<int64_t>(1, std::min(step, most)));
  if (most <= step) input.wide_allowed = false;
  // Enough rows in larger sequences to fill the GPU with wide units.
  const int64_t large = ragged ? rows - sequences : rows;
  if (input.wide_allowed && blocks(large, wide_step) * heads >= 2 * input.processors) input.wide_always = true;
  room.wide = static_cast<int32_t>(!input.wide_allowed ? 0
                                   : ragged            ? (rows / wide_step + sequences + 1) * heads
                                                       : sequences * blocks(input.queries, wide_step) * heads);
  // Of n rows in m sequences, blocks of s tokens: at most (n + m (s - 1)) / s. Where everything of more than one block
  // is wide, a sequence has one split block at most.
  const int64_t s = room.split_tokens, most_blocks = (rows + std::min(sequences, rows) * (s - 1)) / s;
  const bool all_wide = input.wide_allowed && input.wide_always && (!ragged || sequences == 1);
  room.split_units = static_cast<int32_t>(heads * (all_wide  ? 0
                                                   : !ragged ? sequences * blocks(input.queries, s)
                                                   : input.wide_allowed && input.wide_always
                                                       ? std::min(sequences, rows)
                                                       : most_blocks + (room.wide == 0 ? 1 : 0)));
  room.keys_shared = ragged ? rows > sequences * s : input.queries > s;
  if (room.split_units > 0) {
    // Keys that do not begin at a chunk's border may touch one more.
    const int64_t keys = input.keys + (input.key_begin.data != nullptr ? 1024 : 0);
    const int64_t chunks = AttentionChunks::of(static_cast<int>((keys + 127) / 128)) + 1;
    room.slot_rows = room.split_tokens * input.group;
    room.items = 2 * input.processors + 3 * room.split_units + 2048;
    // One chunk is never cut. Nor are short units, if they are enough for all processors: folding would cost more.
    const bool whole = chunks == 1 || (input.keys <= kShortKeys && sequences * heads >= input.processors);
    room.folds = whole ? 0 : std::min(room.split_units, 3 * input.processors);
    room.most_slots = static_cast<int32_t>(chunks + 1);
    room.slots = static_cast<int32_t>(std::min<int64_t>(room.folds * (chunks + 1), kMostPartialRows / room.slot_rows));
  }
  return room;
}

void plan_attention(const AttentionPlanInput& input, const AttentionPlanRoom& room, int32_t* words) {
  AttentionPlanner<OneThread>(OneThread{}, input, room, words, words + room.scratch_at()).run();
}

}  // namespace quartz::kernels
