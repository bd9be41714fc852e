// The plan of attention on CUDA, made on the host: whatever the lengths, each query of each head is computed once, over
// its tiles, cut at the boundaries of chunks only, and partial results have slots of their own.
#include "kernels/attention_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace quartz::kernels {
namespace {

using Chunks = AttentionChunks;

struct Lengths {
  std::vector<int32_t> starts{0}, keys;
  void add(int queries, int sequence_keys) {
    starts.push_back(starts.back() + queries);
    keys.push_back(sequence_keys);
  }
};

struct Plan {
  AttentionPlanInput input{};
  AttentionPlanRoom room{};
  std::vector<int32_t> words;

  const AttentionItem* items() const { return reinterpret_cast<const AttentionItem*>(words.data() + room.items_at()); }
  const AttentionItem* wide() const { return reinterpret_cast<const AttentionItem*>(words.data() + room.wide_at()); }
  const AttentionFold* folds() const { return reinterpret_cast<const AttentionFold*>(words.data() + room.folds_at()); }
};

AttentionPlanInput options(int group, int heads) {
  AttentionPlanInput input{};
  input.group = group;
  input.heads = heads;
  input.processors = 132;
  input.causal = true;
  input.wide_allowed = true;
  return input;
}

void make(Plan& plan) {
  plan.room = attention_plan_room(plan.input);
  plan.words.assign(plan.room.words(), -1);
  plan_attention(plan.input, plan.room, plan.words.data());
}

Plan ragged_plan(AttentionPlanInput input, const Lengths& lengths, int more_rows = 0, int most_keys = 131072) {
  Plan plan;
  plan.input = input;
  plan.input.query_starts = {lengths.starts.data(), false};
  plan.input.key_counts = {lengths.keys.data(), false};
  plan.input.sequences = static_cast<int32_t>(lengths.keys.size());
  plan.input.queries = lengths.starts.back() + more_rows;
  plan.input.keys = most_keys;
  make(plan);
  return plan;
}

// Tiles that the tokens [token, token + tokens) of a sequence see, as plainly as possible.
std::pair<int, int> tiles_of(const AttentionPlanInput& input, int position, int tokens, int keys) {
  int first = -1, last = 0;
  for (int i = 0; i < tokens; ++i) {
    for (int key = 0; key < keys; ++key) {
      const int at = position + i;
      if ((input.causal && key > at) || (input.window > 0 && key <= at - input.window)) continue;
      if (first < 0 || key / kAttentionTile < first) first = key / kAttentionTile;
      last = std::max(last, key / kAttentionTile + 1);
    }
  }
  return first < 0 ? std::pair{0, 1} : std::pair{first, last};
}

void check(const Plan& plan, const Lengths& lengths, int more_rows = 0) {
  const int32_t* header = plan.words.data();
  const int statics = header[kPlanStatic], all = header[kPlanAll], wide = header[kPlanWide], folds = header[kPlanFolds];
  ASSERT_LE(all, plan.room.items);
  ASSERT_LE(wide, plan.room.wide);
  ASSERT_LE(folds, plan.room.folds);
  for (int i = kPlanCounters; i < 16; ++i) EXPECT_EQ(header[i], 0);
  if (all > 0) {
    const int32_t* offsets = header + plan.room.offsets_at();
    EXPECT_EQ(offsets[0], plan.input.processors);
    EXPECT_EQ(offsets[plan.input.processors], statics);
    EXPECT_TRUE(std::is_sorted(offsets, offsets + plan.input.processors + 1));
  }

  using Key = std::tuple<int, int, int, bool>;  // sequence, head, token, wide
  std::map<Key, std::vector<AttentionItem>> units;
  for (int i = 0; i < all; ++i) {
    const AttentionItem& item = plan.items()[i];
    if (item.sequence < 0) {
      EXPECT_LT(i, plan.input.processors);
      continue;
    }
    units[{item.sequence, item.head, item.token, false}].push_back(item);
  }
  for (int i = 0; i < wide; ++i) {
    const AttentionItem& item = plan.wide()[i];
    units[{item.sequence, item.head, item.token, true}].push_back(item);
  }
  std::map<Key, AttentionFold> fold_of;
  for (int i = 0; i < folds; ++i) {
    const AttentionFold& fold = plan.folds()[i];
    if (fold.slots == 0) {
      EXPECT_EQ(fold.tokens, 0);
      continue;
    }
    ASSERT_TRUE(fold_of.insert({{fold.sequence, fold.head, fold.token, false}, fold}).second);
  }

  std::set<int> slots;
  std::set<std::tuple<int, int>> computed;  // head, row
  const int count = static_cast<int>(lengths.keys.size());
  for (auto& [key, items] : units) {
    const auto [sequence, head, token, is_wide] = key;
    const bool none = sequence == count;
    const int begin = none ? lengths.starts.back() : lengths.starts[sequence];
    const int queries = none ? more_rows : lengths.starts[sequence + 1] - begin;
    const int keys = none ? 0 : lengths.keys[sequence],
              position = none ? token - begin : keys - queries + token - begin;
    std::sort(items.begin(), items.end(), [](const auto& a, const auto& b) { return a.tile_begin < b.tile_begin; });
    const int tokens = items[0].tokens;
    EXPECT_LE(tokens, is_wide ? 2 * (64 / plan.input.group) : plan.room.split_tokens);
    const auto [first, last] = tiles_of(plan.input, position, tokens, keys);
    EXPECT_LE(items.front().tile_begin, first);
    EXPECT_GE(items.back().tile_end, last);
    EXPECT_TRUE(!is_wide || items.size() == 1);
    int next_slot = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const AttentionItem& item = items[i];
      EXPECT_EQ(item.position, position);
      EXPECT_EQ(item.keys, keys);
      EXPECT_EQ(item.tokens, tokens);
      EXPECT_LT(item.tile_begin, item.tile_end);
      EXPECT_EQ((item.flags & AttentionItem::kBegins) != 0, i == 0);
      EXPECT_EQ((item.flags & AttentionItem::kEnds) != 0, i + 1 == items.size());
      if (i > 0) {
        EXPECT_EQ(item.tile_begin, items[i - 1].tile_end);
        EXPECT_EQ(item.tile_begin, Chunks::begin(Chunks::of(item.tile_begin)));
        EXPECT_EQ(item.slot, next_slot);
      }
      if (items.size() > 1) {
        const int writes = i == 0 ? 1 : Chunks::of(item.tile_end - 1) - Chunks::of(item.tile_begin) + 1;
        for (int s = 0; s < writes; ++s) EXPECT_TRUE(slots.insert(item.slot + s).second);
        next_slot = item.slot + writes;
      }
    }
    const auto fold = fold_of.find(key);
    EXPECT_EQ(fold != fold_of.end(), items.size() > 1);
    if (fold != fold_of.end()) {
      EXPECT_EQ(fold->second.slot, items[0].slot);
      EXPECT_EQ(fold->second.slot + fold->second.slots, next_slot);
      EXPECT_EQ(fold->second.tokens, tokens);
      EXPECT_LE(fold->second.slots, plan.room.most_slots);
    }
    for (int t = token; t < token + tokens; ++t) EXPECT_TRUE(computed.insert({head, t}).second);
  }
  EXPECT_TRUE(slots.empty() || *slots.rbegin() < plan.room.slots);
  EXPECT_EQ(computed.size(), static_cast<size_t>(lengths.starts.back() + more_rows) * plan.input.heads);
}

TEST(AttentionChunks, BeginAndOfAreInverse) {
  for (int tile = 0; tile < 2000; ++tile) {
    const int chunk = Chunks::of(tile);
    EXPECT_LE(Chunks::begin(chunk), tile);
    EXPECT_GT(Chunks::begin(chunk + 1), tile);
  }
  EXPECT_EQ(Chunks::begin(4), 8);    // 1024 keys
  EXPECT_EQ(Chunks::begin(18), 64);  // 8192 keys
  EXPECT_EQ(Chunks::begin(19), 72);
}

TEST(AttentionGroup, FitsIntoAWarpgroup) {
  EXPECT_EQ(attention_group(32, 4), 8);
  EXPECT_EQ(attention_group(7, 7), 1);
  EXPECT_EQ(attention_group(64, 1), 64);
  EXPECT_EQ(attention_group(128, 1), 64);
  EXPECT_EQ(attention_group(71, 1), 1);
}

TEST(AttentionPlan, DecodingOfEqualSequences) {
  for (const auto& [sequences, keys] :
       {std::pair{1, 1024}, {1, 8192}, {1, 131072}, {8, 8192}, {64, 1024}, {64, 8192}, {256, 2048}}) {
    Lengths lengths;
    for (int i = 0; i < sequences; ++i) lengths.add(1, keys);
    check(ragged_plan(options(8, 4), lengths), lengths);
  }
}

TEST(AttentionPlan, SharesTheWorkEvenly) {
  Lengths lengths;
  for (int i = 0; i < 64; ++i) lengths.add(1, 8192);
  const Plan plan = ragged_plan(options(8, 4), lengths);
  const int32_t* offsets = plan.words.data() + plan.room.offsets_at();
  for (int i = 0; i < plan.input.processors; ++i) {
    int tiles = plan.items()[i].tile_end - plan.items()[i].tile_begin;
    for (int j = offsets[i]; j < offsets[i + 1]; ++j) tiles += plan.items()[j].tile_end - plan.items()[j].tile_begin;
    EXPECT_LE(tiles, 64 * 64 * 4 / 132);
  }
}

TEST(AttentionPlan, FewSequencesFillTheGpu) {
  for (const auto& [sequences, keys, most] : {std::tuple{1, 1024, 2}, {1, 8192, 4}, {1, 131072, 40}, {8, 8192, 16}}) {
    Lengths lengths;
    for (int i = 0; i < sequences; ++i) lengths.add(1, keys);
    const Plan plan = ragged_plan(options(8, 4), lengths);
    EXPECT_EQ(plan.words[kPlanAll], plan.input.processors);  // nothing to be taken from a pool
    for (int i = 0; i < plan.input.processors; ++i) {
      const AttentionItem& item = plan.items()[i];
      if (item.sequence < 0) continue;
      EXPECT_LE(item.tile_end - item.tile_begin, most);
    }
  }
}

TEST(AttentionPlan, OneLongAmongShortIsShared) {
  Lengths lengths;
  for (int i = 0; i < 24; ++i) lengths.add(1, 100);
  lengths.add(1, 131072);
  const Plan plan = ragged_plan(options(8, 4), lengths);
  check(plan, lengths);
  for (int i = 0; i < plan.input.processors; ++i) EXPECT_GE(plan.items()[i].sequence, 0);
}

TEST(AttentionPlan, ManyShortUnitsStayWhole) {
  for (const int sequences : {33, 64, 66, 99, 100, 200}) {
    Lengths lengths;
    for (int i = 0; i < sequences; ++i) lengths.add(1, 1 + i * 37 % 1024);
    const Plan plan = ragged_plan(options(8, 4), lengths, 0, 1024);
    EXPECT_EQ(plan.room.folds, 0);
    check(plan, lengths);
  }
}

TEST(AttentionPlan, AnyLengths) {
  std::mt19937 random(1);
  const auto upto = [&](int n) { return static_cast<int>(random() % (n + 1)); };
  for (int repeat = 0; repeat < 100; ++repeat) {
    const int groups[] = {1, 2, 3, 5, 7, 8, 12, 16};
    AttentionPlanInput input = options(groups[upto(7)], 1 + upto(3));
    input.causal = upto(4) > 0;
    input.window = upto(2) == 0 ? 1 + upto(300) : 0;
    input.processors = upto(1) == 0 ? 132 : 4;
    input.wide_allowed = upto(3) > 0;
    input.wide_always = upto(3) == 0;
    Lengths lengths;
    for (int i = upto(30); i > 0; --i) {
      const int keys = upto(1) == 0 ? upto(300) : upto(3000);
      const int queries = upto(1) == 0 ? 1 : upto(std::min(keys + 2, 200));
      lengths.add(queries, keys);
    }
    const int more = upto(2) == 0 ? upto(50) : 0;
    check(ragged_plan(input, lengths, more, upto(1) == 0 ? 131072 : 3000), lengths, more);
  }
}

// On the GPU nobody can report bad lengths: they must not lead out of the plan.
TEST(AttentionPlan, BadLengthsStayWithinTheRoom) {
  Lengths lengths;
  lengths.add(5, -3);
  lengths.add(-4, 1 << 30);
  lengths.add(100, 70);
  Plan plan;
  plan.input = options(8, 2);
  plan.input.query_starts = {lengths.starts.data(), false};
  plan.input.key_counts = {lengths.keys.data(), false};
  plan.input.sequences = 3;
  plan.input.queries = 60;
  plan.input.keys = 1024;
  make(plan);
  const auto inside = [&](const AttentionItem& item) {
    if (item.sequence < 0) return;
    EXPECT_GE(item.token, 0);
    EXPECT_LE(item.token + item.tokens, 60);
    EXPECT_GE(item.keys, 0);
    EXPECT_LE(item.keys, 1024);
    EXPECT_LE(item.tile_end, 8);
  };
  ASSERT_LE(plan.words[kPlanAll], plan.room.items);
  ASSERT_LE(plan.words[kPlanWide], plan.room.wide);
  for (int i = 0; i < plan.words[kPlanAll]; ++i) inside(plan.items()[i]);
  for (int i = 0; i < plan.words[kPlanWide]; ++i) inside(plan.wide()[i]);
}

// Dense sequences that begin behind padding, or before what is stored: positions and numbers of keys count from there,
// every token of every head is planned, over the tiles that it sees.
TEST(AttentionPlan, DenseSequencesWithBoundsOfTheirKeys) {
  const std::vector<int32_t> begin{0, 650, -2000}, end{700, 690, 700};
  for (const int queries : {1, 40, 300}) {
    for (const int window : {0, 300}) {
      Plan plan;
      plan.input = options(4, 2);
      plan.input.sequences = 3;
      plan.input.queries = queries;
      plan.input.keys = 700;
      plan.input.query_offset = 700 - queries;
      plan.input.window = window;
      plan.input.key_begin = {begin.data(), false};
      plan.input.key_end = {end.data(), false};
      make(plan);
      std::map<std::tuple<int, int, int>, std::set<int>> planned;  // sequence, head, token: tiles
      const auto see = [&](const AttentionItem& item) {
        if (item.sequence < 0) return;
        const int first = begin[item.sequence];
        EXPECT_EQ(item.keys, end[item.sequence] - first);
        EXPECT_EQ(item.position, plan.input.query_offset + item.token - first);
        const auto [low, high] = tiles_of(plan.input, item.position, item.tokens, item.keys);
        EXPECT_GE(item.tile_begin, low);
        EXPECT_LE(item.tile_end, high);
        for (int i = 0; i < item.tokens; ++i) {
          auto& tiles = planned[{item.sequence, item.head, item.token + i}];
          for (int tile = item.tile_begin; tile < item.tile_end; ++tile) EXPECT_TRUE(tiles.insert(tile).second);
        }
      };
      for (int i = 0; i < plan.words[kPlanAll]; ++i) see(plan.items()[i]);
      for (int i = 0; i < plan.words[kPlanWide]; ++i) see(plan.wide()[i]);
      EXPECT_EQ(planned.size(), static_cast<size_t>(3 * 2 * queries));
    }
  }
}

}  // namespace
}  // namespace quartz::kernels
