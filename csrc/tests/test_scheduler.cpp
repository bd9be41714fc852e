// What the scheduler puts into a step, whom it refuses, and what it makes of the tokens of a step.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "simulated_device.h"

namespace quartz::engine::testing {
namespace {

SchedulerConfig small(int64_t blocks = 100, int64_t budget = 64, int64_t max_drafts = 0) {
  SchedulerConfig config;
  config.block_size = 16;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = budget;
  config.max_model_len = 256;
  config.groups = {{GroupKind::kFull, 0, blocks, 0}};
  config.max_drafts = max_drafts;
  return config;
}

std::vector<int32_t> text(int64_t length, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

void add(Scheduler* scheduler, int64_t key, const std::vector<int32_t>& prompt, int64_t max_tokens = 20,
         RequestOptions options = {}) {
  options.key = key;
  options.max_tokens = max_tokens;
  scheduler->add_request(options, prompt.data(), static_cast<int64_t>(prompt.size()));
}

// Takes a step whose sequences draw these tokens (one row each; none for a chunk that is not the last).
StepOutput take(Scheduler* scheduler, const StepPlan& plan, const std::vector<std::vector<int32_t>>& rows) {
  const auto columns = static_cast<size_t>(1 + scheduler->config().max_drafts);
  std::vector<int32_t> tokens(plan.key.size() * columns, -1);
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(), tokens.begin() + static_cast<int64_t>(i * columns));
  }
  const auto output = scheduler->update(plan.step_id, tokens.data(), static_cast<int64_t>(plan.key.size()),
                                        static_cast<int64_t>(columns), nullptr, nullptr);
  scheduler->check();
  return output;
}
// The same token for everyone who draws one.
StepOutput take_one(Scheduler* scheduler, const StepPlan& plan, int32_t token) {
  std::vector<std::vector<int32_t>> rows(plan.key.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (plan.samples[i] != 0) rows[i] = {token};
  }
  return take(scheduler, plan, rows);
}

template <class Call>
std::string refusal(const Call& call) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}
void expect_words(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << message << " lacks " << word;
}

TEST(Scheduler, RefusesWhatCanNeverRun) {
  Scheduler scheduler(small(4));  // 64 tokens
  const auto refused = [&](const std::vector<int32_t>& prompt, RequestOptions options, int64_t max_tokens = 5) {
    return refusal([&] { add(&scheduler, 1, prompt, max_tokens, options); });
  };
  expect_words(refused({}, {}), {"add_request", "prompt", "at least one token", "got 0"});
  expect_words(refused(text(256), {}), {"prompt", "255", "got 256"});
  expect_words(refused(text(65), {}), {"prompt", "never fit", "64 tokens", "got 65"});
  expect_words(refused({3, -2}, {}), {"prompt[1]", "token id", "got -2"});
  expect_words(refused({1}, {}, 0), {"max_tokens", "got 0"});
  expect_words(refused({1}, {.min_tokens = 6}), {"min_tokens", "max_tokens = 5", "got 6"});
  expect_words(refused({1}, {.n = 0}), {"n: ", "got 0"});
  expect_words(refused({1}, {.drafts = 1}), {"drafts", "max_drafts = 0", "got 1"});
  expect_words(refused({1}, {.logits_from = 1}), {"logits_from", "got 1"});
  expect_words(refused({1}, {.priority = 2}), {"priority", "fcfs", "got 2"});
  expect_words(refused({1}, {.stop_ids = {-1}}), {"stop_ids", "got -1"});
  add(&scheduler, 1, {1});
  expect_words(refused({1}, {}), {"key", "unfinished", "got 1"});
  EXPECT_EQ(scheduler.num_waiting(), 1);
  add(&scheduler, 2, text(64));  // exactly fits
}

TEST(Scheduler, RefusesAConfigurationThatCannotWork) {
  const auto refused = [](const auto& change) {
    SchedulerConfig config = small();
    change(config);
    return refusal([&] { Scheduler scheduler(config); });
  };
  expect_words(refused([](auto& c) { c.block_size = 0; }), {"block_size", "got 0"});
  expect_words(refused([](auto& c) { c.max_num_seqs = 0; }), {"max_num_seqs", "got 0"});
  expect_words(refused([](auto& c) { c.max_num_batched_tokens = -1; }), {"max_num_batched_tokens", "got -1"});
  expect_words(refused([](auto& c) { c.max_model_len = 1; }), {"max_model_len", "got 1"});
  expect_words(refused([](auto& c) { c.max_drafts = 65; }), {"max_drafts", "got 65"});
  expect_words(refused([](auto& c) { c.groups.clear(); }), {"groups", "got 0"});
  expect_words(refused([](auto& c) { c.groups[0].num_blocks = 0; }), {"groups[0].num_blocks", "got 0"});
  expect_words(refused([](auto& c) { c.groups[0].window = 8; }), {"groups[0].window", "got 8"});
  expect_words(refused([](auto& c) {
                 c.groups[0] = {GroupKind::kSliding, 64, 4, 0};
               }),
               {"groups[0].num_blocks", "window of 64", "5 blocks", "got 4"});
}

TEST(Scheduler, DecodesComeFirstAndPromptsShareTheRest) {
  Scheduler scheduler(small(100, 40));
  add(&scheduler, 1, text(10));
  add(&scheduler, 2, text(10, 50));
  auto plan = scheduler.schedule();
  EXPECT_EQ(plan->query_len, (std::vector<int32_t>{10, 10}));
  take_one(&scheduler, *plan, 5);
  add(&scheduler, 3, text(30, 100));
  add(&scheduler, 4, text(30, 200));
  plan = scheduler.schedule();
  EXPECT_EQ(plan->key, (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(plan->query_len, (std::vector<int32_t>{1, 1, 30, 8}));
  EXPECT_EQ(plan->kind, (std::vector<int32_t>{1, 1, 0, 0}));
  EXPECT_EQ(plan->start, (std::vector<int32_t>{-1, -1, 0, 0}));
  EXPECT_EQ(plan->samples, (std::vector<int32_t>{1, 1, 1, 0}));
  EXPECT_EQ(plan->num_rows, 40);
  take_one(&scheduler, *plan, 5);
  plan = scheduler.schedule();
  EXPECT_EQ(plan->query_len, (std::vector<int32_t>{1, 1, 1, 22}));
  EXPECT_EQ(plan->start, (std::vector<int32_t>{-1, -1, -1, 8}));
  take_one(&scheduler, *plan, 5);
}

TEST(Scheduler, ALimitOfRowsForOnePromptLetsOthersIn) {
  SchedulerConfig config = small(100, 64);
  config.max_prefill_tokens_per_request = 12;
  Scheduler scheduler(config);
  add(&scheduler, 1, text(100));
  add(&scheduler, 2, text(5, 150));
  const auto plan = scheduler.schedule();
  EXPECT_EQ(plan->query_len, (std::vector<int32_t>{12, 5}));
  take_one(&scheduler, *plan, 1);
}

// Every running decode has a row in every step, however long the prompts beside it are.
TEST(Scheduler, DecodesNeverWaitForPrompts) {
  SchedulerConfig config = small(400, 16);
  config.max_model_len = 2000;
  Scheduler scheduler(config);
  for (int64_t key = 0; key < 3; ++key) add(&scheduler, key, text(4, static_cast<int32_t>(100 * key)), 100);
  auto plan = scheduler.schedule();
  take_one(&scheduler, *plan, 1);
  for (int64_t key = 10; key < 13; ++key) add(&scheduler, key, text(900, static_cast<int32_t>(1000 * key)), 5);
  std::shared_ptr<StepPlan> before;
  for (int step = 0; step < 90; ++step) {
    plan = scheduler.schedule();
    ASSERT_EQ((std::vector<int64_t>{plan->key.begin(), plan->key.begin() + 3}), (std::vector<int64_t>{0, 1, 2}));
    ASSERT_EQ(plan->num_rows, 16);
    if (before != nullptr) take_one(&scheduler, *before, 1);
    before = plan;
  }
}

TEST(Scheduler, MoreSequencesThanRowsTakeTurns) {
  SchedulerConfig config = small(100, 3, 2);
  Loop loop(config, 1);
  for (int64_t key = 0; key < 12; ++key) {
    Job job;
    job.options.key = key;
    job.options.max_tokens = 9;
    job.prompt = text(1 + key, static_cast<int32_t>(key));
    loop.add(job);
  }
  while (loop.scheduler.has_unfinished()) {
    ASSERT_TRUE(loop.turn());
    ASSERT_LE(loop.scheduler.num_running(), 3);
    if (loop.last != nullptr) {
      ASSERT_LE(loop.last->num_rows, 3);
    }
  }
  loop.drain();
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST(Scheduler, TheQueueGoesByArrivalOrByPriority) {
  for (const Policy policy : {Policy::kFcfs, Policy::kPriority}) {
    SchedulerConfig config = small();
    config.max_num_seqs = 1;
    config.policy = policy;
    Scheduler scheduler(config);
    const int64_t priorities[] = {3, 1, 2, 1};
    for (int64_t key = 0; key < 4; ++key) {
      add(&scheduler, key, text(3, static_cast<int32_t>(10 * key)), 1,
          {.priority = policy == Policy::kPriority ? priorities[key] : 0});
    }
    std::vector<int64_t> order;
    while (const auto plan = scheduler.schedule()) {
      order.push_back(plan->key[0]);
      take_one(&scheduler, *plan, 1);
    }
    EXPECT_EQ(order, policy == Policy::kFcfs ? (std::vector<int64_t>{0, 1, 2, 3}) : (std::vector<int64_t>{1, 3, 2, 0}));
  }
}

// Case F2: the end token inside a verified chunk.
TEST(Scheduler, TokensBehindTheEndDoNotCount) {
  struct Variant {
    std::vector<int32_t> stop_ids;
    int64_t min_tokens;  // the end token is the fourth of the output
    int32_t kept, finished, stop;
  };
  const Variant variants[] = {{{7}, 0, 3, 1, 7}, {{}, 0, 6, 0, -1}, {{7}, 5, 6, 0, -1}, {{7}, 4, 3, 1, 7}};
  for (const Variant& v : variants) {
    Scheduler scheduler(small(100, 64, 5));
    add(&scheduler, 1, text(15, 100), 50, {.min_tokens = v.min_tokens, .stop_ids = v.stop_ids});
    auto plan = scheduler.schedule();
    take(&scheduler, *plan, {{20}});
    plan = scheduler.schedule();
    ASSERT_EQ(plan->drafts[0], 5);
    const auto next = scheduler.schedule();  // in flight when the end becomes known
    ASSERT_NE(next, nullptr);
    const auto output = take(&scheduler, *plan, {{21, 22, 7, 24, 25, 26}});
    EXPECT_EQ(output.num_tokens[0], v.kept);
    EXPECT_EQ(output.finished[0], v.finished);
    EXPECT_EQ(output.stop_token[0], v.stop);
    const auto rest = take(&scheduler, *next, {{30, 31, 32, 33, 34, 35}});
    EXPECT_EQ(rest.num_tokens[0], v.finished == 0 ? 6 : 0);
    EXPECT_EQ(rest.finished[0], v.finished == 0 ? 0 : 3);
    EXPECT_EQ(scheduler.stats().tokens, 1 + v.kept + rest.num_tokens[0]);
    if (v.finished == 0) continue;
    EXPECT_FALSE(scheduler.has_unfinished());
    // Nothing behind the end can be found: the text up to it is 15 + 1 + 3 tokens, one full block.
    std::vector<int32_t> longer = text(15, 100);
    longer.insert(longer.end(), {20, 21, 22, 7, 24, 25, 26, 30, 31, 32, 33, 34, 35, 1, 2, 3, 4, 5, 6, 7});
    add(&scheduler, 2, longer);
    EXPECT_EQ(scheduler.schedule()->new_sequences[0].cached, 16);
  }
}

TEST(Scheduler, LengthsCutInsideAVerifiedChunk) {
  for (const bool model_len : {false, true}) {
    SchedulerConfig config = small(100, 64, 5);
    config.max_model_len = 14;
    Scheduler scheduler(config);
    add(&scheduler, 1, text(10, 100), model_len ? 100 : 4);
    auto plan = scheduler.schedule();
    take(&scheduler, *plan, {{20}});
    plan = scheduler.schedule();
    EXPECT_EQ(plan->drafts[0], 2);  // 14 tokens at most: three more
    EXPECT_LE(plan->max_length[0], 13);
    EXPECT_EQ(scheduler.schedule(), nullptr);  // it may be at its end
    const auto output = take(&scheduler, *plan, {{21, 22, 23}});
    EXPECT_EQ(output.num_tokens[0], 3);
    EXPECT_EQ(output.finished[0], 2);
    EXPECT_FALSE(scheduler.has_unfinished());
  }
}

TEST(Scheduler, WhatCannotBeDrawnEndsItsSequenceAlone) {
  Scheduler scheduler(small());
  add(&scheduler, 1, text(20));
  add(&scheduler, 2, text(20, 50));
  const auto plan = scheduler.schedule();
  const auto output = take(&scheduler, *plan, {{-1}, {4}});
  EXPECT_EQ(output.finished, (std::vector<int32_t>{4, 0}));
  ASSERT_EQ(output.errors.size(), 1u);
  EXPECT_EQ(output.errors[0].key, 1);
  expect_words(output.errors[0].reason, {"position 20", "NaN"});
  EXPECT_EQ(scheduler.num_running(), 1);
  // Its keys may be NaN: they are not kept.
  add(&scheduler, 3, text(20));
  const auto next = scheduler.schedule();
  EXPECT_EQ(next->new_sequences.at(0).cached, 0);
}

TEST(Scheduler, ASequenceThatFillsTheDeviceEndsByLength) {
  const std::vector<std::vector<GroupSpec>> groups = {{{GroupKind::kFull, 0, 3, 0}},
                                                      {{GroupKind::kFull, 0, 3, 8}, {GroupKind::kSliding, 20, 3, 8}},
                                                      {{GroupKind::kFull, 0, 3, 0}, {GroupKind::kState, 0, 1, 0}}};
  for (const auto& spec : groups) {
    for (const int64_t drafts : {0, 3}) {
      for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
        SchedulerConfig config = small(1, 64, drafts);
        config.groups = spec;
        config.preemption = preemption;
        Loop loop(config, 5);
        for (int64_t key = 0; key < 3; ++key) {
          Job job;
          job.options.key = key;
          job.options.max_tokens = 200;
          job.prompt = text(10 + key, static_cast<int32_t>(key));
          loop.add(job);
        }
        loop.drain(1000);
        for (int64_t key = 0; key < 3; ++key) {
          EXPECT_EQ(loop.outcome(key).finish, Finish::kLength);
          EXPECT_EQ(static_cast<int64_t>(loop.outcome(key).output.size()), 3 * 16 + 1 - (10 + key));
        }
        loop.expect_outcomes();
        loop.expect_no_leak();
      }
    }
  }
}

TEST(Scheduler, UpdateRefusesTheTokensOfAnotherStep) {
  Scheduler scheduler(small(100, 64, 2));
  add(&scheduler, 1, text(70));
  const auto plan = scheduler.schedule();
  std::vector<int32_t> none(6, -1);
  const auto update = [&](int64_t step, const std::vector<int32_t>& tokens, int64_t rows, int64_t columns) {
    return refusal([&] { scheduler.update(step, tokens.data(), rows, columns, nullptr, nullptr); });
  };
  expect_words(update(plan->step_id + 1, none, 1, 3), {"step_id", "oldest step in flight (0)", "got 1"});
  expect_words(update(plan->step_id, none, 2, 3), {"tokens", "1 sequences", "got 2"});
  expect_words(update(plan->step_id, none, 1, 2), {"tokens", "= 3 columns", "got 2"});
  expect_words(update(plan->step_id, {5, -1, -1}, 1, 3), {"tokens[0, 0]", "at most 0 tokens", "got 5"});
  take(&scheduler, *plan, {{}});
  expect_words(update(plan->step_id, none, 1, 3), {"step_id", "none", "got 0"});
  const auto last = scheduler.schedule();
  expect_words(update(last->step_id, {5, 6, -1}, 1, 3), {"tokens[0, 1]", "at most 1 tokens", "got 6"});
  take(&scheduler, *last, {{5}});
}

TEST(Scheduler, AtMostTwoStepsAreInFlight) {
  Scheduler scheduler(small());
  add(&scheduler, 1, text(4));
  const auto first = scheduler.schedule();
  const auto second = scheduler.schedule();
  EXPECT_EQ(scheduler.num_in_flight(), 2);
  EXPECT_THROW(scheduler.schedule(), std::logic_error);
  take_one(&scheduler, *first, 1);
  take_one(&scheduler, *second, 1);
  EXPECT_EQ(scheduler.num_in_flight(), 0);
}

TEST(Scheduler, APlanIsNotTouchedWhileSomebodyHasIt) {
  Scheduler scheduler(small());
  add(&scheduler, 1, text(4));
  const auto first = scheduler.schedule();
  take_one(&scheduler, *first, 1);
  for (int i = 0; i < 5; ++i) take_one(&scheduler, *scheduler.schedule(), 1);
  EXPECT_EQ(first->step_id, 0);
  EXPECT_EQ(first->query_len, (std::vector<int32_t>{4}));
}

// Case G7: half of the requests are cancelled at random moments, 200 rounds; twice, and after the end.
TEST(Scheduler, CancelledAtAnyMoment) {
  for (const Preemption preemption : {Preemption::kRecompute, Preemption::kSwap}) {
    SchedulerConfig config = small(12, 24, 2);
    config.groups[0].host_blocks = 20;
    config.preemption = preemption;
    Loop loop(config, 9);
    std::mt19937 random(4);
    for (int64_t round = 0; round < 200; ++round) {
      for (int64_t i = 0; i < 6; ++i) {
        Job job;
        job.options.key = round * 6 + i;
        job.options.max_tokens = 30;
        job.options.n = i == 0 ? 3 : 1;
        job.prompt = text(20 + 10 * i, static_cast<int32_t>(random() % 40));
        loop.add(job);
      }
      for (int64_t i = 0; i < 6; i += 2) {
        for (auto turns = random() % 8; turns > 0; --turns) loop.turn();
        loop.abort(round * 6 + i);
        loop.abort(round * 6 + i);
      }
      loop.drain();
      loop.abort(round * 6 + 1);
      loop.scheduler.finish(round * 6 + 1, 0);
      loop.scheduler.finish(round * 6 + 1, 77);
      for (const GroupStats& group : loop.scheduler.stats().groups) {
        ASSERT_EQ(group.used, 0);
        ASSERT_EQ(group.host_used, 0);
      }
    }
    loop.expect_outcomes();
    loop.expect_no_leak();
  }
}

TEST(Scheduler, AQueueOfTenThousand) {
  Scheduler scheduler(small(400, 256));
  for (int64_t key = 0; key < 10000; ++key) add(&scheduler, key, text(8, static_cast<int32_t>(key)), 1);
  EXPECT_EQ(scheduler.num_waiting(), 10000);
  for (int64_t key = 5000; key < 10000; ++key) EXPECT_TRUE(scheduler.abort(key));
  int64_t done = 0;
  while (const auto plan = scheduler.schedule()) {
    const auto output = scheduler.update(plan->step_id, std::vector<int32_t>(plan->key.size(), 3).data(),
                                         static_cast<int64_t>(plan->key.size()), 1, nullptr, nullptr);
    done += std::count(output.finished.begin(), output.finished.end(), 2);
  }
  EXPECT_EQ(done, 5000);
  scheduler.check();
}

}  // namespace
}  // namespace quartz::engine::testing
