// Blocks: what is shared, copied, cached, given back, swapped, and what is never kept.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "simulated_device.h"

namespace quartz::engine::testing {
namespace {

SchedulerConfig config_of(std::vector<GroupSpec> groups, int64_t budget = 256) {
  SchedulerConfig config;
  config.block_size = 16;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = budget;
  config.max_model_len = 512;
  config.groups = std::move(groups);
  return config;
}

std::vector<int32_t> text(int64_t length, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  for (size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<int32_t>((i * 7 + static_cast<size_t>(first)) % 1000);
  return tokens;
}

Job job(int64_t key, std::vector<int32_t> prompt, int64_t max_tokens = 4) {
  Job result;
  result.options.key = key;
  result.options.max_tokens = max_tokens;
  result.prompt = std::move(prompt);
  return result;
}

// Runs a job alone to its end; gives how many tokens of its prompt were cached.
int64_t cached(Loop* loop, const Job& job) {
  const int64_t before = loop->scheduler.stats().prefix_hits;
  loop->add(job);
  loop->drain();
  return loop->scheduler.stats().prefix_hits - before;
}

TEST(SchedulerMemory, HitsAreWholeBlocksAndLeaveTheLastToken) {
  Loop loop(config_of({{GroupKind::kFull, 0, 100, 0}}), 1);
  EXPECT_EQ(cached(&loop, job(0, text(48))), 0);
  int64_t key = 1;
  for (const auto& [length, hit] : std::vector<std::pair<int64_t, int64_t>>{
           {15, 0}, {16, 0}, {17, 16}, {31, 16}, {32, 16}, {33, 32}, {48, 32}, {49, 48}, {200, 48}}) {
    EXPECT_EQ(cached(&loop, job(key++, text(length))), hit) << length;
  }
  EXPECT_EQ(cached(&loop, job(key++, text(48, 1))), 0);
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(SchedulerMemory, TheOutputIsCachedToo) {
  Loop loop(config_of({{GroupKind::kFull, 0, 100, 0}}), 1);
  loop.add(job(0, text(20), 40));
  loop.drain();
  std::vector<int32_t> chat = text(20);
  const auto& output = loop.outcome(0).output;
  chat.insert(chat.end(), output.begin(), output.end());
  chat.push_back(1);
  // 60 tokens, the last of which was never computed.
  EXPECT_EQ(cached(&loop, job(1, chat)), 48);
  loop.expect_outcomes();
}

TEST(SchedulerMemory, NamespacesShareNothing) {
  Loop loop(config_of({{GroupKind::kFull, 0, 100, 0}}), 1);
  int64_t key = 0;
  for (const std::string& name : {std::string(), std::string("x"), std::string("x\0", 2), std::string("\0", 1)}) {
    Job one = job(key++, text(40));
    one.options.name_space = name;
    EXPECT_EQ(cached(&loop, one), 0);
    one.options.key = key++;
    EXPECT_EQ(cached(&loop, one), 32);
  }
}

// Case G4: prompt logprobs need the logits of all rows.
TEST(SchedulerMemory, LogitsOfThePromptAreComputedWhateverIsCached) {
  Loop loop(config_of({{GroupKind::kFull, 0, 100, 0}}, 20), 1, 0.6, false);
  cached(&loop, job(0, text(33)));
  for (const auto& [from, cache_read, length] : std::vector<std::tuple<int64_t, bool, int64_t>>{
           {0, false, 33}, {0, false, 31}, {16, true, 33}, {20, true, 33}}) {
    Job one = job(10 + from + length + (cache_read ? 1000 : 0), text(length));
    one.options.logits_from = from;
    one.options.cache_read = cache_read;
    loop.add(one);
    std::vector<int64_t> rows;
    while (loop.scheduler.has_unfinished()) {
      ASSERT_TRUE(loop.turn());
      const StepPlan& plan = *loop.last;
      if (plan.kind[0] != 0 || plan.logits_from[0] < 0) continue;
      ASSERT_GE(plan.logits_from[0], plan.start[0]);
      const int64_t end = std::min<int64_t>(plan.start[0] + plan.query_len[0], length - 1);
      for (int64_t row = plan.logits_from[0]; row < end; ++row) rows.push_back(row);
    }
    std::vector<int64_t> wanted(static_cast<size_t>(length - 1 - from));
    std::iota(wanted.begin(), wanted.end(), from);
    EXPECT_EQ(rows, wanted);
  }
}

// Case G5: A, A with a suffix, then A again after others pressed its blocks out.
TEST(SchedulerMemory, CachedBlocksGoLeastRecentlyUsedFirst) {
  Loop loop(config_of({{GroupKind::kFull, 0, 8, 0}}), 1);
  EXPECT_EQ(cached(&loop, job(0, text(48))), 0);  // 4 blocks with its output, 3 of them cached
  EXPECT_EQ(cached(&loop, job(1, text(60))), 48);
  EXPECT_EQ(cached(&loop, job(2, text(48, 500))), 0);  // 4 of the 8 blocks
  EXPECT_EQ(cached(&loop, job(3, text(60))), 48);      // the first blocks of a text stay longest
  EXPECT_EQ(cached(&loop, job(4, text(120, 300))), 0);
  EXPECT_EQ(cached(&loop, job(5, text(60))), 0);
  EXPECT_GT(loop.scheduler.stats().evictions, 0);
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(SchedulerMemory, PromptsThatArriveTogetherAreComputedOnce) {
  for (const bool overlap : {false, true}) {
    Loop loop(config_of({{GroupKind::kFull, 0, 200, 0}}, 128), 1, 0.6, overlap);
    for (int64_t key = 0; key < 6; ++key) {
      std::vector<int32_t> prompt = text(320);
      for (int64_t i = 0; i < 10; ++i) prompt.push_back(static_cast<int32_t>(20 + key));
      loop.add(job(key, prompt));
    }
    loop.add(job(9, text(10, 77)));  // passes them by
    loop.turn();
    EXPECT_EQ(loop.scheduler.num_running(), 1);
    loop.drain();
    const SchedulerStats stats = loop.scheduler.stats();
    EXPECT_EQ(stats.prefix_hits, 5 * 320);
    EXPECT_EQ(stats.prefix_waits, 5);
    loop.expect_outcomes();
    loop.expect_no_leak();
  }
}

TEST(SchedulerMemory, AFewCommonTokensAreNotWaitedFor) {
  Loop loop(config_of({{GroupKind::kFull, 0, 200, 0}}, 512), 1);
  std::vector<int32_t> prompt = text(200);
  loop.add(job(0, prompt));
  std::fill(prompt.begin() + 40, prompt.end(), 3);
  loop.add(job(1, prompt));
  loop.turn();
  EXPECT_EQ(loop.scheduler.num_running(), 2);
  loop.drain();
  loop.expect_outcomes();
}

TEST(SchedulerMemory, SamplesShareThePromptAndCopyItsLastBlock) {
  for (const int64_t length : {1, 2, 16, 17, 32, 33, 40}) {
    for (const bool caching : {false, true}) {
      SchedulerConfig config = config_of({{GroupKind::kFull, 0, 100, 0}});
      config.enable_prefix_caching = caching;
      Loop loop(config, 1, 0.6, false);
      Job one = job(0, text(length), 6);
      one.options.n = 5;
      loop.add(one);
      size_t copies = 0, forked = 0;
      int64_t most_used = 0, rows = 0;
      while (loop.scheduler.has_unfinished()) {
        ASSERT_TRUE(loop.turn());
        copies += loop.last->copies.size();
        forked += loop.last->forked.size();
        rows += loop.last->num_rows;
        most_used = std::max(most_used, loop.scheduler.stats().groups[0].used);
      }
      const int64_t shared = (length - 1) / 16;
      EXPECT_EQ(forked, length > 1 ? 4u : 0u);
      EXPECT_EQ(copies, (length - 1) % 16 != 0 ? 4u : 0u);
      EXPECT_LE(most_used, shared + 5 * 2);
      EXPECT_EQ(rows, length - 1 + 5 * 6) << "the prompt is computed once, its last token by each";
      loop.expect_outcomes();
      loop.expect_no_leak();
      std::set<std::vector<int32_t>> outputs;
      for (int32_t i = 0; i < 5; ++i) outputs.insert(loop.outcome(0, i).output);
      EXPECT_EQ(outputs.size(), 5u);
    }
  }
}

TEST(SchedulerMemory, SamplesWithoutASlotComeLater) {
  SchedulerConfig config = config_of({{GroupKind::kFull, 0, 100, 0}});
  config.max_num_seqs = 3;
  Loop loop(config, 1);
  Job one = job(0, text(40), 6);
  one.options.n = 8;
  loop.add(one);
  loop.drain();
  EXPECT_EQ(loop.scheduler.stats().forks, 2);
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(SchedulerMemory, TheOtherSamplesGoOnWhenTheFirstIsEnded) {
  for (int turns = 0; turns < 6; ++turns) {
    Loop loop(config_of({{GroupKind::kFull, 0, 100, 0}}, 16), 1);
    Job one = job(0, text(40), 6);
    one.options.n = 3;
    loop.add(one);
    for (int i = 0; i < turns; ++i) loop.turn();
    loop.finish(0, 0);
    loop.scheduler.check();
    loop.drain();
    EXPECT_EQ(loop.outcome(0, 1).output.size(), 6u);
    EXPECT_EQ(loop.outcome(0, 2).output.size(), 6u);
    loop.expect_outcomes();
    loop.expect_no_leak();
  }
}

TEST(SchedulerMemory, PreemptionKeepsTheOutput) {
  struct Variant {
    Preemption preemption;
    int64_t host_blocks;
  };
  for (const Variant& v :
       {Variant{Preemption::kRecompute, 0}, Variant{Preemption::kSwap, 40}, Variant{Preemption::kSwap, 2}}) {
    for (const bool caching : {false, true}) {
      SchedulerConfig config = config_of({{GroupKind::kFull, 0, 12, v.host_blocks}});
      config.preemption = v.preemption;
      config.enable_prefix_caching = caching;
      Loop loop(config, 1);
      for (int64_t key = 0; key < 4; ++key) {
        Job one = job(key, text(20, static_cast<int32_t>(100 * key)), 100);
        one.options.n = key == 2 ? 3 : 1;
        loop.add(one);
      }
      loop.drain();
      const SchedulerStats stats = loop.scheduler.stats();
      EXPECT_GT(stats.preemptions, 0);
      if (v.host_blocks == 40) {
        EXPECT_EQ(stats.swaps_out, stats.preemptions);
      }
      if (v.host_blocks == 2) {
        EXPECT_LT(stats.swaps_out, stats.preemptions);
      }
      EXPECT_EQ(stats.swaps_in, stats.swaps_out);
      if (caching && v.preemption == Preemption::kRecompute) {
        EXPECT_GT(stats.resumed_hits, 0);
      }
      loop.expect_outcomes();
      loop.expect_no_leak();
    }
  }
}

// A plan that moved blocks out but has no rows is gone on with; meanwhile the sequence may have ended.
TEST(SchedulerMemory, WhatIsNotWantedAnyMoreIsNotMovedOut) {
  KvCache cache(config_of({{GroupKind::kFull, 0, 8, 8}}));
  SequenceKv ended, other;
  StepPlan plan;
  for (SequenceKv* kv : {&ended, &other}) {
    cache.open(kv, "");
    cache.grow(kv, 40, 0, &plan);
    ASSERT_TRUE(cache.swap_out(kv, 40, &plan));
  }
  ASSERT_EQ(plan.swap_out.size(), 6u);
  cache.drop_host(&ended);
  cache.drop_stale(&plan);
  ASSERT_EQ(plan.swap_out.size(), 3u);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(plan.swap_out[i][2], other.host[0][i]);
}

TEST(SchedulerMemory, TheLastOneInGivesItsBlocksBack) {
  SchedulerConfig config = config_of({{GroupKind::kFull, 0, 4, 0}});
  Scheduler scheduler(config);
  for (int64_t key = 0; key < 2; ++key) {
    const auto prompt = text(15, static_cast<int32_t>(100 * key));
    RequestOptions options;
    options.key = key;
    options.max_tokens = 40;
    scheduler.add_request(options, prompt.data(), 15);
  }
  int64_t preempted_at = -1;
  while (scheduler.has_unfinished()) {
    const auto plan = scheduler.schedule();
    ASSERT_NE(plan, nullptr);
    if (preempted_at < 0 || scheduler.num_preempted() > 0) {
      ASSERT_EQ(plan->key[0], 0);
    }
    if (preempted_at < 0 && scheduler.num_preempted() > 0) preempted_at = plan->step_id;
    std::vector<int32_t> tokens(plan->key.size(), -1);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = plan->samples[i] != 0 ? 1 : -1;
    scheduler.update(plan->step_id, tokens.data(), static_cast<int64_t>(tokens.size()), 1, nullptr, nullptr);
  }
  EXPECT_GT(preempted_at, 0);
}

TEST(SchedulerMemory, ASlidingWindowGivesBlocksBackWhileItRuns) {
  SchedulerConfig config = config_of({{GroupKind::kSliding, 40, 30, 0}});
  Loop loop(config, 1);
  loop.add(job(0, text(200), 200));
  while (loop.scheduler.has_unfinished()) {
    ASSERT_TRUE(loop.turn());
    if (loop.last != nullptr && loop.last->kind[0] == 1) {
      ASSERT_LE(loop.scheduler.stats().groups[0].used, 5);
    }
  }
  loop.drain();
  loop.expect_outcomes();
  // A hit needs the last window alone: 40 tokens before 192.
  EXPECT_EQ(cached(&loop, job(1, text(200))), 192);
  // Other texts press out what is oldest, the blocks before the last window.
  EXPECT_EQ(cached(&loop, job(2, text(300, 500))), 0);
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(SchedulerMemory, ChunksAreCutToTheBlocksOfASlidingWindow) {
  Loop loop(config_of({{GroupKind::kSliding, 33, 4, 0}}), 1);
  for (int64_t key = 0; key < 3; ++key) loop.add(job(key, text(300, static_cast<int32_t>(key)), 20));
  loop.drain();
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(SchedulerMemory, RecurrentStatesAreFoundAtTheEndsOfChunks) {
  for (const bool full : {false, true}) {
    std::vector<GroupSpec> groups = {{GroupKind::kState, 0, 20, 0}};
    if (full) groups.insert(groups.begin(), {GroupKind::kFull, 0, 100, 0});
    Loop loop(config_of(groups), 1);
    EXPECT_EQ(cached(&loop, job(0, text(100))), 0);
    EXPECT_EQ(cached(&loop, job(1, text(100))), 96);
    EXPECT_EQ(cached(&loop, job(2, text(300))), 96);
    // Another end: the first of its kind keeps the state where the texts part, the next ones find it.
    std::vector<int32_t> other = text(50);
    for (int32_t i = 0; i < 40; ++i) other.push_back(7);
    EXPECT_EQ(cached(&loop, job(3, other)), 0);
    other.back() = 8;
    other[60] = 9;
    EXPECT_EQ(cached(&loop, job(4, other)), 48);
    loop.expect_outcomes();
    loop.expect_no_leak();
  }
}

TEST(SchedulerMemory, NothingIsFoundAfterAReset) {
  Loop loop(config_of({{GroupKind::kFull, 0, 100, 0}}, 16), 1);
  cached(&loop, job(0, text(64)));
  loop.add(job(1, text(64, 300), 30));
  for (int i = 0; i < 3; ++i) loop.turn();
  loop.scheduler.reset_prefix_cache();
  ++loop.device.world;
  loop.drain();
  EXPECT_EQ(cached(&loop, job(2, text(64))), 0);
  EXPECT_EQ(cached(&loop, job(3, text(64, 300))), 0);  // it was running at the reset
  EXPECT_EQ(cached(&loop, job(4, text(64, 300))), 48);
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(SchedulerMemory, AFailedStepLeavesNothingBehind) {
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    SchedulerConfig config = config_of({{GroupKind::kFull, 0, 10, 20}, {GroupKind::kSliding, 20, 12, 10}}, 24);
    config.preemption = preemption;
    config.max_drafts = 2;
    Loop loop(config, 1);
    for (int64_t key = 0; key < 5; ++key) loop.add(job(key, text(40, static_cast<int32_t>(key)), 30));
    for (int i = 0; loop.scheduler.has_unfinished(); ++i) ASSERT_TRUE(loop.turn(i % 7 == 6));
    loop.drain();
    EXPECT_GT(loop.scheduler.stats().discarded_steps, 5);
    loop.expect_outcomes();
    loop.expect_no_leak();
  }
}

TEST(SchedulerMemory, AFailedStepTakesTheOneBehindItAlong) {
  Scheduler scheduler(config_of({{GroupKind::kFull, 0, 20, 0}}));
  const auto prompt = text(40);
  RequestOptions options;
  options.max_tokens = 5;
  scheduler.add_request(options, prompt.data(), 40);
  const auto first = scheduler.schedule();
  const auto second = scheduler.schedule();
  scheduler.discard(first->step_id);
  scheduler.check();
  EXPECT_EQ(scheduler.num_in_flight(), 0);
  EXPECT_EQ(scheduler.num_preempted(), 1);
  EXPECT_THROW(scheduler.discard(second->step_id), std::invalid_argument);
  const auto again = scheduler.schedule();
  EXPECT_EQ(again->new_sequences.at(0).cached, 0);
  EXPECT_EQ(again->query_len, (std::vector<int32_t>{40}));
}

}  // namespace
}  // namespace quartz::engine::testing
