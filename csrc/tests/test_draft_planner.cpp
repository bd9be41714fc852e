// How many drafts are verified: the rule of quartz::spec_schedule, tried out choice by choice.
#include "engine/draft_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace quartz::engine {
namespace {

using Lengths = std::vector<int32_t>;

// All (chance, sequence, draft) in the order of the rule; then the shortest beginning with the best tokens for the
// time.
Lengths by_trial(const std::vector<Sequence>& sequences, const Lengths& most, const std::vector<float>& times,
                 int64_t others, int64_t rows) {
  struct Draft {
    float chance;
    size_t sequence;
  };
  std::vector<Draft> drafts;
  for (size_t i = 0; i < sequences.size(); ++i) {
    float chance = 1.0f;
    for (int32_t j = 0; j < most[i]; ++j) {
      const auto& given = sequences[i].confidences;
      const float c = given.empty() ? sequences[i].acceptance : given[static_cast<size_t>(j)];
      chance *= c > 0.0f ? std::min(c, 1.0f) : 0.0f;
      if (chance > 0.0f) drafts.push_back({chance, i});
    }
  }
  std::stable_sort(drafts.begin(), drafts.end(), [](const Draft& a, const Draft& b) { return a.chance > b.chance; });
  const auto rate = [&](size_t count) {
    const auto step = static_cast<size_t>(others) + count;
    if (step >= times.size() || !(times[step] > 0.0f)) return -1.0;
    double tokens = static_cast<double>(sequences.size());
    for (size_t i = 0; i < count; ++i) tokens += drafts[i].chance;
    return tokens / static_cast<double>(times[step]);
  };
  size_t chosen = 0;
  for (size_t count = 1; count <= drafts.size() && static_cast<int64_t>(count) <= rows; ++count) {
    if (rate(count) > rate(chosen)) chosen = count;
  }
  Lengths lengths(sequences.size(), 0);
  for (size_t i = 0; i < chosen; ++i) ++lengths[drafts[i].sequence];
  return lengths;
}

Lengths plan(DraftPlanner* planner, const std::vector<Sequence>& sequences, const Lengths& most, int64_t others,
             int64_t rows) {
  planner->begin();
  for (size_t i = 0; i < sequences.size(); ++i) planner->add(&sequences[i], most[i]);
  Lengths lengths;
  planner->plan(others, rows, &lengths);
  return lengths;
}

TEST(DraftPlanner, ChoosesTheBestTokensForTheTime) {
  std::mt19937 random(2);
  std::uniform_real_distribution<float> uniform(0.0f, 1.0f);
  for (int round = 0; round < 500; ++round) {
    DraftPlanner planner(5, 16, true);
    const size_t n = 1 + random() % 8;
    const auto others = static_cast<int64_t>(n + random() % 10);
    // A step costs more with rows, by jumps as tiles fill up; some numbers of rows are not allowed.
    std::vector<float> times;
    float time = 1.0f;
    for (int i = 0; i < 60; ++i) {
      if (i % 8 == 0) time += 0.5f * uniform(random);
      times.push_back(random() % 20 == 0 ? 0.0f : time);
    }
    planner.set_step_times(times);
    std::vector<Sequence> sequences(n);
    Lengths most;
    for (Sequence& s : sequences) {
      s.acceptance = random() % 5 == 0 ? 0.5f : uniform(random);
      if (random() % 2 == 0) {
        for (int j = 0; j < 5; ++j) s.confidences.push_back(1.4f * uniform(random) - 0.2f);
      }
      most.push_back(static_cast<int32_t>(random() % 6));
    }
    const auto rows = static_cast<int64_t>(random() % 30);
    const Lengths lengths = plan(&planner, sequences, most, others, rows);
    EXPECT_EQ(lengths, by_trial(sequences, most, times, others, rows)) << round;
    EXPECT_LE(std::accumulate(lengths.begin(), lengths.end(), int64_t{0}), rows);
  }
}

TEST(DraftPlanner, WithoutAScheduleEveryDraftThatFitsIsVerified) {
  std::vector<Sequence> sequences(3);
  for (const bool adaptive : {false, true}) {  // adaptive, but no step times yet
    DraftPlanner planner(4, 8, adaptive);
    EXPECT_EQ(plan(&planner, sequences, {4, 1, 2}, 3, 100), (Lengths{4, 1, 2}));
    EXPECT_EQ(plan(&planner, sequences, {4, 1, 2}, 3, 5), (Lengths{2, 1, 2}));  // first drafts before second ones
    EXPECT_EQ(plan(&planner, sequences, {4, 1, 2}, 3, 0), (Lengths{0, 0, 0}));
  }
}

TEST(DraftPlanner, TheAverageFollowsWhatIsAccepted) {
  Sequence good, bad;
  DraftPlanner::start(&good);
  DraftPlanner::start(&bad);
  for (int i = 0; i < 60; ++i) {
    DraftPlanner::observe(&good, 4, 4);
    DraftPlanner::observe(&bad, 4, 0);
  }
  EXPECT_GT(good.acceptance, 0.99f);
  EXPECT_LT(bad.acceptance, 0.01f);
  // Without a trial it returns, so that a sequence whose text has changed is tried again.
  for (int i = 0; i < 200; ++i) DraftPlanner::observe(&bad, 0, 0);
  EXPECT_GT(bad.acceptance, 0.4f);
}

}  // namespace
}  // namespace quartz::engine
