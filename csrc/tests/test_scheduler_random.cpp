// Whatever is admitted, chunked, cached, forked, preempted, drafted, aborted or failed, and with a step in flight:
// every sequence reads its own keys alone, has the output of a plain loop, and no block is lost.
#include <gtest/gtest.h>

#include <random>

#include "simulated_device.h"

namespace quartz::engine::testing {
namespace {

struct Case {
  const char* name;
  std::vector<GroupSpec> groups;
  Preemption preemption = Preemption::kRecompute;
  bool caching = true;
  int64_t max_drafts = 0;
  bool adaptive = false;
  Policy policy = Policy::kFcfs;
  int64_t prefill_limit = 0;
};

std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

constexpr auto kFull = GroupKind::kFull;
constexpr auto kSliding = GroupKind::kSliding;
constexpr auto kState = GroupKind::kState;

const Case kCases[] = {
    {"plain", {{kFull, 0, 60, 0}}},
    {"uncached", {{kFull, 0, 40, 0}}, Preemption::kRecompute, false},
    {"tiny", {{kFull, 0, 14, 0}}},
    {"tiny_swap", {{kFull, 0, 14, 30}}, Preemption::kSwap},
    {"tiny_swap_little_host", {{kFull, 0, 14, 5}}, Preemption::kSwap},
    {"drafts", {{kFull, 0, 30, 0}}, Preemption::kRecompute, true, 3},
    {"drafts_swap", {{kFull, 0, 20, 40}}, Preemption::kSwap, true, 5},
    {"adaptive", {{kFull, 0, 40, 0}}, Preemption::kRecompute, true, 5, true},
    {"sliding", {{kSliding, 9, 24, 0}}},
    {"sliding_drafts", {{kSliding, 9, 12, 0}}, Preemption::kRecompute, true, 4},
    {"full_sliding", {{kFull, 0, 40, 0}, {kSliding, 6, 20, 0}}, Preemption::kRecompute, true, 3},
    {"full_sliding_swap", {{kFull, 0, 20, 40}, {kSliding, 6, 12, 20}}, Preemption::kSwap, true, 3},
    {"state", {{kState, 0, 12, 0}}},
    {"hybrid", {{kFull, 0, 40, 0}, {kState, 0, 10, 0}}},
    {"hybrid_swap", {{kFull, 0, 16, 40}, {kState, 0, 6, 6}}, Preemption::kSwap},
    {"all",
     {{kFull, 0, 24, 30}, {kSliding, 5, 16, 30}, {kState, 0, 9, 4}},
     Preemption::kSwap,
     true,
     2,
     false,
     Policy::kPriority},
    {"priority", {{kFull, 0, 20, 0}}, Preemption::kRecompute, true, 2, true, Policy::kPriority, 7},
};

class SchedulerRandom : public ::testing::TestWithParam<Case> {};

SchedulerConfig configure(const Case& c, int64_t budget) {
  SchedulerConfig config;
  config.block_size = 4;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = budget;
  config.max_model_len = 64;
  config.groups = c.groups;
  config.enable_prefix_caching = c.caching;
  config.policy = c.policy;
  config.preemption = c.preemption;
  config.max_drafts = c.max_drafts;
  config.adaptive_drafts = c.adaptive;
  config.max_prefill_tokens_per_request = c.prefill_limit;
  return config;
}

class Jobs {
 public:
  Jobs(const Case& c, uint64_t seed) : case_(c), random_(seed) {
    for (int i = 0; i < 3; ++i) {
      auto& text = texts_.emplace_back();
      for (int j = 0; j < 64; ++j) text.push_back(static_cast<int32_t>(random_() % kVocabulary));
    }
  }
  uint64_t below(uint64_t n) { return random_() % n; }

  Job make(int64_t key, int64_t most_prompt) {
    Job job;
    job.options.key = key;
    const int64_t length = 1 + static_cast<int64_t>(below(static_cast<uint64_t>(most_prompt)));
    const auto& text = texts_[below(3)];
    job.prompt.assign(text.begin(), text.begin() + length);
    // Some leave the common text somewhere.
    if (below(2) == 0) {
      for (auto i = static_cast<size_t>(below(static_cast<uint64_t>(length))); i < job.prompt.size(); ++i) {
        job.prompt[i] = static_cast<int32_t>(below(kVocabulary));
      }
    }
    job.options.max_tokens = 1 + static_cast<int64_t>(below(40));
    job.options.min_tokens =
        below(3) == 0 ? static_cast<int64_t>(below(static_cast<uint64_t>(job.options.max_tokens))) : 0;
    job.options.n = below(4) == 0 ? 2 + static_cast<int64_t>(below(3)) : 1;
    if (below(2) == 0) job.options.stop_ids = {static_cast<int32_t>(below(kVocabulary)), 3};
    if (below(4) == 0) job.options.name_space = "other";
    if (below(8) == 0) job.options.cache_read = false;
    if (below(6) == 0) job.options.logits_from = static_cast<int64_t>(below(static_cast<uint64_t>(length)));
    if (below(12) == 0) job.fails_at = static_cast<int64_t>(below(6));
    if (case_.policy == Policy::kPriority) job.options.priority = static_cast<int64_t>(below(3));
    if (case_.max_drafts > 0 && below(4) == 0) {
      job.options.drafts = static_cast<int64_t>(below(static_cast<uint64_t>(case_.max_drafts) + 1));
    }
    return job;
  }

 private:
  const Case& case_;
  std::mt19937_64 random_;
  std::vector<std::vector<int32_t>> texts_;
};

void serve(const Case& c, uint64_t seed, int requests) {
  Jobs jobs(c, seed);
  const int64_t budgets[] = {3, 8, 16, 200};
  const SchedulerConfig config = configure(c, budgets[jobs.below(4)]);
  const double qualities[] = {0.0, 0.5, 1.0};
  Loop loop(config, seed + 1, qualities[jobs.below(3)], jobs.below(4) != 0);
  if (c.adaptive) {
    std::vector<float> times;
    for (int i = 0; i < 100; ++i)
      times.push_back(1.0f + 0.01f * static_cast<float>(jobs.below(20 + static_cast<uint64_t>(i))));
    loop.scheduler.set_step_times(times);
  }
  const int64_t most_prompt = std::min<int64_t>(40, loop.scheduler.max_sequence_tokens() - 1);
  const bool rough = jobs.below(3) == 0;  // failing steps, resets
  for (int64_t key = 0; key < requests;) {
    const uint64_t what = jobs.below(16);
    if (what < 5) {
      loop.add(jobs.make(key++, most_prompt));
    } else if (what == 5 && key > 0) {
      loop.abort(static_cast<int64_t>(jobs.below(static_cast<uint64_t>(key))));
    } else if (what == 6 && key > 0) {
      const auto of = static_cast<int64_t>(jobs.below(static_cast<uint64_t>(key)));
      if (loop.known_request(of))
        loop.finish(of, static_cast<int32_t>(jobs.below(static_cast<uint64_t>(loop.samples(of)))));
    } else if (what == 7 && rough && jobs.below(6) == 0) {
      loop.scheduler.reset_prefix_cache();
      ++loop.device.world;
    } else {
      loop.turn(rough && jobs.below(12) == 0);
      if (loop.idle && key > 0 && jobs.below(2) == 0) {
        loop.abort(std::max<int64_t>(0, key - 1 - static_cast<int64_t>(jobs.below(10))));
      }
    }
    loop.scheduler.check();
    if (::testing::Test::HasFatalFailure()) return;
  }
  loop.drain();
  if (::testing::Test::HasFatalFailure()) return;
  loop.expect_outcomes();
  loop.expect_no_leak();
}

TEST_P(SchedulerRandom, EverySequenceReadsItsOwnKeys) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    serve(GetParam(), seed, 40);
    if (HasFatalFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(All, SchedulerRandom, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace quartz::engine::testing
