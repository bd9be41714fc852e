// A device without arithmetic for tests of the scheduler. The "key" of a token is a hash of all tokens up to it, so
// that a block with the keys of any other text is noticed; the next token is a hash of the text too. Steps run in the
// order in which they were planned, and everything that a plan says about blocks is done to the letter.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "engine/scheduler.h"

namespace quartz::engine::testing {

constexpr int kVocabulary = 40;
constexpr uint64_t kRubbish = 0xDEADBEEFull;

inline uint64_t mix(uint64_t h, uint64_t value) {
  h = (h ^ value) * 0x9E3779B97F4A7C15ull;
  return h ^ (h >> 29);
}

// Hashes of all beginnings: entry i covers the first i tokens.
inline std::vector<uint64_t> prefixes(const std::vector<int32_t>& tokens, uint64_t world) {
  std::vector<uint64_t> result{mix(17, world)};
  for (const int32_t token : tokens) result.push_back(mix(result.back(), static_cast<uint64_t>(token)));
  return result;
}

// What the model says behind this text, for one of n samples.
inline int32_t next_token(const std::vector<int32_t>& tokens, int32_t index) {
  uint64_t h = 99;
  for (const int32_t token : tokens) h = mix(h, static_cast<uint64_t>(token));
  return static_cast<int32_t>(mix(h, static_cast<uint64_t>(index) + 1) % kVocabulary);
}

struct Job {
  RequestOptions options;
  std::vector<int32_t> prompt;
  int64_t fails_at = -1;  // this output token cannot be drawn
};

struct Outcome {
  std::vector<int32_t> output;
  Finish finish = Finish::kNone;
  bool ended_by_caller = false;
};

// The output of a sequence by a plain loop.
inline Outcome plain_loop(const Job& job, int32_t index, int64_t most_tokens) {
  Outcome outcome;
  std::vector<int32_t> tokens = job.prompt;
  for (;;) {
    if (static_cast<int64_t>(outcome.output.size()) == job.fails_at) {
      outcome.finish = Finish::kError;
      return outcome;
    }
    const int32_t token = next_token(tokens, index);
    tokens.push_back(token);
    outcome.output.push_back(token);
    const auto count = static_cast<int64_t>(outcome.output.size());
    bool stops = false;
    for (const int32_t id : job.options.stop_ids) stops = stops || id == token;
    if (stops && count >= job.options.min_tokens) {
      outcome.finish = Finish::kStop;
      return outcome;
    }
    if (count >= job.options.max_tokens || static_cast<int64_t>(tokens.size()) >= most_tokens) {
      outcome.finish = Finish::kLength;
      return outcome;
    }
  }
}

class SimulatedDevice {
 public:
  SimulatedDevice(const SchedulerConfig& config, uint64_t seed, double draft_quality)
      : config_(config), random_(seed), draft_quality_(draft_quality) {
    for (const GroupSpec& group : config.groups) {
      const auto cells = static_cast<size_t>(config.block_size);
      memory_.emplace_back(static_cast<size_t>(group.num_blocks), std::vector<uint64_t>(cells, kRubbish));
      host_.emplace_back(static_cast<size_t>(group.host_blocks), std::vector<uint64_t>(cells, kRubbish));
    }
    slots_.resize(static_cast<size_t>(config.max_num_seqs));
    for (Slot& slot : slots_) slot.tables.resize(config.groups.size());
  }

  struct Result {
    std::shared_ptr<StepPlan> plan;
    std::vector<int32_t> tokens, available;
  };
  using Known = std::pair<const Job*, std::vector<int32_t>>;  // of a sequence: its job, its tokens so far

  // `known(key, index)`: what the host knows now. With `fails` the rows write rubbish and nothing is drawn.
  template <class Lookup>
  Result run(const std::shared_ptr<StepPlan>& plan, const Lookup& known, bool fails = false) {
    const StepPlan& p = *plan;
    expect_any_order(p);
    for (const int32_t slot : p.released) slots_[static_cast<size_t>(slot)].job = nullptr;
    move(p.swap_out, 1, memory_, 2, host_, fails);
    move(p.swap_in, 2, host_, 1, memory_, false);
    for (const NewSequence& entry : p.new_sequences) {
      Slot& slot = slots_[static_cast<size_t>(entry.slot)];
      EXPECT_EQ(slot.job, nullptr) << "slot " << entry.slot << " is still taken";
      const Known sequence = known(entry.key, entry.index);
      slot.job = sequence.first;
      slot.index = entry.index;
      slot.tokens = sequence.second;
      slot.world = world_of(entry, p);
      slot.drafts.clear();
      slot.failed = false;
      for (auto& table : slot.tables) table.assign(1024, -1);
    }
    move(p.copies, 1, memory_, 2, memory_, false);
    for (const auto& [op, group, from, to] : p.state_ops) {
      auto& blocks = memory_[static_cast<size_t>(group)];
      // A state before any token depends on nothing but must have been cleared.
      blocks[static_cast<size_t>(to)] =
          op == kZeroState ? std::vector<uint64_t>(blocks[0].size(), 0) : blocks[static_cast<size_t>(from)];
    }
    for (const auto& [group, slot, column, block] : p.table_updates) {
      slots_[static_cast<size_t>(slot)].tables[static_cast<size_t>(group)].at(static_cast<size_t>(column)) = block;
    }
    forward(p, fails);
    return sample(plan, fails);
  }

  uint64_t world = 0;  // keys of one world must not serve in another (namespaces, and resets of the cache)

 private:
  struct Slot {
    const Job* job = nullptr;
    int32_t index = 0;
    uint64_t world = 0;
    bool failed = false;  // no token could be drawn: its length, and so its state, do not go on
    std::vector<int32_t> tokens;
    std::vector<int32_t> drafts;
    std::vector<std::vector<int32_t>> tables;
  };
  using Memory = std::vector<std::vector<std::vector<uint64_t>>>;

  static uint64_t name_space(const Job& job) { return std::hash<std::string>()(job.options.name_space); }

  // A sequence that comes back from host memory keeps the keys of its world, and so does one that was forked.
  uint64_t world_of(const NewSequence& entry, const StepPlan& plan) {
    const Slot& slot = slots_[static_cast<size_t>(entry.slot)];
    const std::pair name{entry.key, entry.index};
    uint64_t result = mix(name_space(*slot.job), world);
    for (const ForkedSequence& fork : plan.forked) {
      if (fork.slot == entry.slot) result = slots_[static_cast<size_t>(fork.parent_slot)].world;
    }
    if (comes_from_host(entry, plan)) result = worlds_.at(name);
    worlds_[name] = result;
    return result;
  }
  bool comes_from_host(const NewSequence& entry, const StepPlan& plan) const {
    for (const auto& [group, block, host] : plan.swap_in) {
      for (const auto& update : plan.table_updates) {
        if (update[0] == group && update[1] == entry.slot && update[3] == block) return true;
      }
    }
    return false;
  }

  // Copies before the forward must not depend on one another.
  static void expect_any_order(const StepPlan& p) {
    std::set<std::pair<int32_t, int32_t>> targets, host_targets;
    for (const auto& row : p.swap_in) ASSERT_TRUE(targets.emplace(row[0], row[1]).second);
    for (const auto& row : p.copies) ASSERT_TRUE(targets.emplace(row[0], row[2]).second);
    for (const auto& row : p.state_ops) ASSERT_TRUE(targets.emplace(row[1], row[3]).second);
    for (const auto& row : p.copies) ASSERT_EQ(targets.count({row[0], row[1]}), 0);
    for (const auto& row : p.state_ops) ASSERT_EQ(targets.count({row[1], row[2]}), 0);
    for (const auto& row : p.swap_out) ASSERT_TRUE(host_targets.emplace(row[0], row[2]).second);
  }

  // From column `source` to column `target` of the rows (group, block, block); all are read before any is written.
  static void move(const std::vector<std::array<int32_t, 3>>& moves, size_t source, const Memory& from, size_t target,
                   Memory& to, bool fails) {
    std::vector<std::vector<uint64_t>> values;
    for (const auto& row : moves)
      values.push_back(from[static_cast<size_t>(row[0])].at(static_cast<size_t>(row[source])));
    for (size_t i = 0; i < moves.size(); ++i) {
      if (fails) values[i].assign(values[i].size(), kRubbish);
      to[static_cast<size_t>(moves[i][0])].at(static_cast<size_t>(moves[i][target])) = values[i];
    }
  }

  int64_t start_of(const StepPlan& p, size_t i) const {
    const Slot& slot = slots_[static_cast<size_t>(p.slot[i])];
    return p.start[i] >= 0 ? p.start[i] : static_cast<int64_t>(slot.tokens.size()) - 1;
  }
  // The tokens of the rows, drafts included, as the device sees them.
  std::vector<int32_t> text_of(const StepPlan& p, size_t i) const {
    const Slot& slot = slots_[static_cast<size_t>(p.slot[i])];
    std::vector<int32_t> text = slot.tokens;
    if (p.kind[i] == 0) {
      text.resize(static_cast<size_t>(p.start[i] + p.query_len[i]));
      return text;
    }
    for (int32_t j = 0; j < p.drafts[i]; ++j) {
      const bool has = j < static_cast<int32_t>(slot.drafts.size());
      text.push_back(has ? slot.drafts[static_cast<size_t>(j)] : 0);
    }
    return text;
  }

  void forward(const StepPlan& p, bool fails) {
    std::map<std::pair<size_t, int32_t>, size_t> writers;
    for (const bool writes : {true, false}) {  // a layer writes the keys of all rows before it reads any
      for (size_t i = 0; i < p.key.size(); ++i) {
        const Slot& slot = slots_[static_cast<size_t>(p.slot[i])];
        ASSERT_NE(slot.job, nullptr);
        ASSERT_EQ(slot.job->options.key, p.key[i]);
        ASSERT_EQ(slot.index, p.index[i]);
        const std::vector<int32_t> text = text_of(p, i);
        const std::vector<uint64_t> keys = prefixes(text, slot.world);
        const int64_t start = start_of(p, i), end = start + p.query_len[i];
        ASSERT_EQ(end, static_cast<int64_t>(text.size()));
        ASSERT_LE(end, p.max_length[i]);
        ASSERT_LE(p.max_length[i], config_.max_model_len);
        for (size_t g = 0; g < config_.groups.size(); ++g) {
          const GroupSpec& group = config_.groups[g];
          const auto& table = slot.tables[g];
          if (group.kind == GroupKind::kState) {
            auto& state = memory_[g].at(static_cast<size_t>(table.at(0)));
            if (writes) {
              ASSERT_TRUE(writers.emplace(std::pair{g, table[0]}, i).second) << "two sequences write one state";
              if (!slot.failed && !fails) check_state(state, keys, start, p, i);
              if (p.kind[i] == 0) state.assign(state.size(), fails ? kRubbish : keys[static_cast<size_t>(end)]);
            }
            continue;
          }
          const auto cell = [&](int64_t position) -> uint64_t& {
            const int32_t block = table.at(static_cast<size_t>(position / config_.block_size));
            return memory_[g].at(static_cast<size_t>(block)).at(static_cast<size_t>(position % config_.block_size));
          };
          for (int64_t row = start; row < end; ++row) {
            if (writes) {
              const int32_t block = table.at(static_cast<size_t>(row / config_.block_size));
              const auto [writer, first] = writers.emplace(std::pair{g, block}, i);
              ASSERT_TRUE(first || writer->second == i) << "two sequences write block " << block;
              cell(row) = fails ? kRubbish : keys[static_cast<size_t>(row) + 1];
              continue;
            }
            if (fails) continue;
            const int64_t first = group.kind == GroupKind::kFull ? 0 : std::max<int64_t>(0, row - group.window + 1);
            for (int64_t q = row == start ? first : std::max(first, row - 1); q <= row; ++q) {
              ASSERT_EQ(cell(q), keys[static_cast<size_t>(q) + 1])
                  << "step " << p.step_id << ": request " << p.key[i] << ", sample " << p.index[i] << ", group " << g
                  << ": the key at " << q << " that the row at " << row << " reads is another text's";
            }
          }
        }
      }
    }
  }
  void check_state(const std::vector<uint64_t>& state, const std::vector<uint64_t>& keys, int64_t start,
                   const StepPlan& p, size_t i) const {
    ASSERT_EQ(state[0], start == 0 ? 0 : keys[static_cast<size_t>(start)])
        << "step " << p.step_id << ": request " << p.key[i] << ", sample " << p.index[i] << ": another state at "
        << start;
  }

  Result sample(const std::shared_ptr<StepPlan>& plan, bool fails) {
    const StepPlan& p = *plan;
    const auto columns = static_cast<size_t>(1 + config_.max_drafts);
    Result result{plan, std::vector<int32_t>(p.key.size() * columns, -1), std::vector<int32_t>(p.key.size(), 0)};
    if (fails) return result;
    for (size_t i = 0; i < p.key.size(); ++i) {
      if (p.samples[i] == 0) continue;
      Slot& slot = slots_[static_cast<size_t>(p.slot[i])];
      size_t count = 0;
      for (;;) {
        const auto output = static_cast<int64_t>(slot.tokens.size() - slot.job->prompt.size());
        if (output == slot.job->fails_at) {
          slot.failed = true;
          break;
        }
        const int32_t token = next_token(slot.tokens, slot.index);
        slot.tokens.push_back(token);
        result.tokens[i * columns + count++] = token;
        const bool accepted =
            count <= static_cast<size_t>(p.drafts[i]) && count <= slot.drafts.size() && slot.drafts[count - 1] == token;
        if (!accepted) break;
      }
      const std::vector<uint64_t> keys = prefixes(slot.tokens, slot.world);
      for (size_t g = 0; g < config_.groups.size(); ++g) {
        if (config_.groups[g].kind != GroupKind::kState || p.kind[i] == 0) continue;
        auto& state = memory_[g].at(static_cast<size_t>(slot.tables[g].at(0)));
        state.assign(state.size(), keys[slot.tokens.size() - 1]);
      }
      propose(&slot);
      result.available[i] = static_cast<int32_t>(slot.drafts.size());
    }
    return result;
  }

  void propose(Slot* slot) {
    slot->drafts.clear();
    std::vector<int32_t> text = slot->tokens;
    const auto most = static_cast<int64_t>(random_() % static_cast<uint64_t>(config_.max_drafts + 1));
    for (int64_t j = 0; j < most; ++j) {
      const bool good = std::uniform_real_distribution<double>()(random_) < draft_quality_;
      slot->drafts.push_back(good ? next_token(text, slot->index) : static_cast<int32_t>(random_() % kVocabulary));
      text.push_back(slot->drafts.back());
    }
  }

  SchedulerConfig config_;
  std::mt19937_64 random_;
  double draft_quality_;
  Memory memory_, host_;
  std::vector<Slot> slots_;
  std::map<std::pair<int64_t, int32_t>, uint64_t> worlds_;
};

// A serving loop around a scheduler and a simulated device, as the engine's: the next step is launched before the
// tokens of the one before are taken.
class Loop {
 public:
  Loop(const SchedulerConfig& config, uint64_t seed, double draft_quality = 0.6, bool overlap = true)
      : scheduler(config), device(config, seed, draft_quality), overlap_(overlap) {}

  void add(const Job& job) {
    auto& kept = jobs_[job.options.key];
    kept = job;
    for (int64_t i = 0; i < job.options.n; ++i) outcomes_[{job.options.key, static_cast<int32_t>(i)}] = {};
    scheduler.add_request(job.options, job.prompt.data(), static_cast<int64_t>(job.prompt.size()));
  }
  void abort(int64_t key) {
    if (!scheduler.abort(key)) return;
    for (int64_t i = 0; i < jobs_.at(key).options.n; ++i) ended_by_caller(key, static_cast<int32_t>(i));
  }
  void finish(int64_t key, int32_t index) {
    scheduler.finish(key, index);
    ended_by_caller(key, index);
  }

  // One turn. False: nothing ran and nothing was in flight.
  bool turn(bool fails = false) {
    auto plan = scheduler.schedule();
    idle = plan == nullptr;
    if (idle && in_flight_.size() == 1) plan = scheduler.schedule();  // asking again does no harm
    scheduler.check();
    if (plan != nullptr) {
      auto result = device.run(
          plan, [this](int64_t key, int32_t index) { return known(key, index); }, fails);
      if (fails) {
        scheduler.discard(plan->step_id);
        scheduler.check();
      } else {
        in_flight_.push_back(std::move(result));
      }
    }
    const bool takes = !in_flight_.empty() && (in_flight_.size() > 1 || plan == nullptr || !overlap_ || fails);
    if (takes) take();
    return plan != nullptr || takes;
  }
  void take() {
    const auto result = std::move(in_flight_.front());
    in_flight_.erase(in_flight_.begin());
    const auto columns = 1 + scheduler.config().max_drafts;
    last = result.plan;
    const StepOutput output =
        scheduler.update(result.plan->step_id, result.tokens.data(), static_cast<int64_t>(result.plan->key.size()),
                         columns, result.available.data(), nullptr);
    scheduler.check();
    for (size_t i = 0; i < output.key.size(); ++i) {
      Outcome& outcome = outcomes_.at({output.key[i], output.index[i]});
      const auto finish = static_cast<Finish>(output.finished[i]);
      if (finish == Finish::kAborted) {
        ASSERT_EQ(output.num_tokens[i], 0);
        continue;
      }
      ASSERT_EQ(outcome.finish, Finish::kNone);
      ASSERT_FALSE(outcome.ended_by_caller);
      for (int32_t j = 0; j < output.num_tokens[i]; ++j) {
        outcome.output.push_back(result.tokens[i * static_cast<size_t>(columns) + static_cast<size_t>(j)]);
      }
      outcome.finish = finish;
    }
  }
  // Until nothing is left. Fails where the scheduler gives up.
  void drain(int64_t turns = 200000) {
    while (scheduler.has_unfinished() || !in_flight_.empty()) {
      ASSERT_TRUE(turn()) << "unfinished requests, and nothing runs or is in flight";
      ASSERT_GT(--turns, 0) << "no end";
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  // Every sequence has the output of the plain loop, or the beginning of it where the caller ended it; nothing leaks.
  void expect_outcomes() {
    for (const auto& [name, outcome] : outcomes_) {
      const Outcome expected = plain_loop(jobs_.at(name.first), name.second, scheduler.max_sequence_tokens());
      if (outcome.ended_by_caller) {
        ASSERT_LE(outcome.output.size(), expected.output.size());
        ASSERT_TRUE(std::equal(outcome.output.begin(), outcome.output.end(), expected.output.begin()));
        continue;
      }
      ASSERT_EQ(outcome.output, expected.output) << "request " << name.first << ", sample " << name.second;
      ASSERT_EQ(outcome.finish, expected.finish) << "request " << name.first << ", sample " << name.second;
    }
  }
  void expect_no_leak() {
    scheduler.check();
    for (const GroupStats& group : scheduler.stats().groups) {
      ASSERT_EQ(group.used, 0);
      ASSERT_EQ(group.host_used, 0);
    }
    scheduler.reset_prefix_cache();
    scheduler.check();
    const SchedulerStats stats = scheduler.stats();
    for (const GroupStats& group : stats.groups) ASSERT_EQ(group.empty, group.num_blocks);
    ASSERT_EQ(stats.nodes, 0);
  }
  const Outcome& outcome(int64_t key, int32_t index = 0) const { return outcomes_.at({key, index}); }
  size_t in_flight() const { return in_flight_.size(); }
  bool known_request(int64_t key) const { return jobs_.count(key) > 0; }
  int64_t samples(int64_t key) const { return jobs_.at(key).options.n; }

  Scheduler scheduler;
  SimulatedDevice device;
  std::shared_ptr<StepPlan> last;  // whose tokens were taken last
  bool idle = false;               // the last turn had nothing to plan at first

 private:
  SimulatedDevice::Known known(int64_t key, int32_t index) const {
    const Job& job = jobs_.at(key);
    std::vector<int32_t> tokens = job.prompt;
    const auto& output = outcomes_.at({key, index}).output;
    tokens.insert(tokens.end(), output.begin(), output.end());
    return {&job, std::move(tokens)};
  }
  void ended_by_caller(int64_t key, int32_t index) {
    Outcome& outcome = outcomes_.at({key, index});
    if (outcome.finish == Finish::kNone) outcome.ended_by_caller = true;
  }

  bool overlap_;
  std::map<int64_t, Job> jobs_;
  std::map<std::pair<int64_t, int32_t>, Outcome> outcomes_;
  std::vector<SimulatedDevice::Result> in_flight_;
};

}  // namespace quartz::engine::testing
