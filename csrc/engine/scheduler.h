// What runs in the next step: mixes decodes, verification and chunks of prompts, hands out slots and blocks, preempts
// when blocks run out, and takes the tokens of finished steps. At most two steps are launched at a time: one is planned
// while the tokens of the one before are not known yet.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/config.h"
#include "engine/draft_planner.h"
#include "engine/kv_cache.h"
#include "engine/request.h"
#include "engine/step_plan.h"

namespace quartz::engine {

struct GroupStats {
  int64_t num_blocks, used, cached, empty, host_blocks, host_used;
};

struct SchedulerStats {
  std::vector<GroupStats> groups;
  int64_t steps = 0, rows = 0;
  int64_t prefix_queries = 0, prefix_hits = 0;  // tokens asked for at first admission, tokens found
  int64_t resumed_hits = 0;                     // tokens found when a preempted sequence came back
  int64_t prefix_waits = 0;                     // sequences that let another compute their prefix
  int64_t preemptions = 0, swaps_out = 0, swaps_in = 0;
  int64_t evictions = 0, nodes = 0;
  int64_t drafts_verified = 0, drafts_accepted = 0;
  int64_t tokens = 0, forks = 0, discarded_steps = 0;
};

class QUARTZ_ENGINE_API Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // Throws std::invalid_argument for what can never run; everything else waits in the queue.
  void add_request(const RequestOptions& options, const int32_t* prompt, int64_t length);
  bool abort(int64_t key);                  // false: not known (any more)
  void finish(int64_t key, int64_t index);  // ended by the caller; unknown ones are fine

  // Null: nothing can run before update(), or there is nothing to run.
  std::shared_ptr<StepPlan> schedule();
  // Of the oldest launched step. `tokens` is (sequences of the plan, 1 + max_drafts), -1 padded; `available` and
  // `confidences` (max_drafts a sequence) describe the drafts of the next step and may be null.
  StepOutput update(int64_t step_id, const int32_t* tokens, int64_t rows, int64_t columns, const int32_t* available,
                    const float* confidences);
  // The step failed: it and those launched after it count as never run, their sequences start again.
  void discard(int64_t step_id);

  void set_step_times(std::vector<float> times);
  void reset_prefix_cache();

  int64_t num_waiting() const;  // sequences that never ran
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  int64_t num_preempted() const { return num_preempted_; }
  bool has_unfinished() const { return num_live_ > 0; }
  int64_t num_in_flight() const { return static_cast<int64_t>(launched_.size()); }
  int64_t max_sequence_tokens() const;  // what a sequence can grow to in these blocks
  SchedulerStats stats() const;
  const SchedulerConfig& config() const { return config_; }
  // Throws std::logic_error on a lost block, slot or sequence.
  void check() const;

 private:
  struct ByRank {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->rank < b->rank; }
  };

  // scheduler.cpp: requests
  void enqueue(Sequence* sequence);
  void lead(Request* request);  // the first live sequence computes the prompt
  void end(Sequence* sequence);
  void drop_if_done(Request* request);
  Sequence* find(int64_t key, int64_t index) const;
  void leave(Sequence* sequence);    // gives its slot back
  void requeue(Sequence* sequence);  // preemption by recompute

  // scheduler_plan.cpp: one step
  std::shared_ptr<StepPlan> fresh_plan();
  void plan_decodes(StepPlan* plan, int64_t* rows);
  void plan_prefills(StepPlan* plan, int64_t* rows);
  void admit(StepPlan* plan, int64_t* rows);
  enum class Admission { kDone, kLater, kNoRoom };
  Admission admit_one(Sequence* sequence, StepPlan* plan, int64_t* rows);
  bool still_waits(Sequence* sequence);
  bool wait_for_prefix(Sequence* sequence, int64_t cached, int64_t most);
  void slide(Sequence* sequence, int64_t start, int64_t keys);
  bool make_room(Sequence* sequence, int64_t tokens, StepPlan* plan);
  void preempt(Sequence* sequence, StepPlan* plan);
  void fork(Sequence* leader, StepPlan* plan, int64_t* rows);
  void enter(Sequence* sequence, int64_t cached, StepPlan* plan);
  int64_t chunk_of(const Sequence& sequence, int64_t rows) const;
  int64_t chunk_that_fits(const Sequence& sequence, int64_t rows) const;
  int64_t spare() const;
  int64_t most_cached(const Sequence& sequence, int64_t target) const;
  void add_decode(Sequence* sequence, int32_t drafts, StepPlan* plan);
  void add_chunk(Sequence* sequence, int64_t chunk, StepPlan* plan);
  void add_row(Sequence* sequence, StepPlan* plan, int32_t rows, int32_t drafts, bool samples);

  // scheduler_update.cpp
  void check_tokens(const StepPlan& plan, const int32_t* tokens, int64_t rows, int64_t columns) const;
  void settle(const StepPlan& plan, size_t i);  // the entry is not in flight any more
  Finish commit(Sequence* sequence, const int32_t* tokens, int32_t count, int32_t* kept, int32_t* stop);

  SchedulerConfig config_;
  KvCache kv_;
  DraftPlanner planner_;
  std::unordered_map<int64_t, std::unique_ptr<Request>> requests_;  // by key: unfinished, or with rows in flight
  std::set<Sequence*, ByRank> waiting_;
  std::vector<Sequence*> running_;  // by rank
  std::vector<Sequence*> decodes_;  // of the step being planned
  std::vector<int32_t> draft_lengths_, free_slots_, released_;
  std::vector<int64_t> reserved_;  // blocks that running prompts will still take, a group
  std::deque<std::shared_ptr<StepPlan>> launched_;
  std::vector<std::shared_ptr<StepPlan>> plans_;
  std::shared_ptr<StepPlan> carried_;
  int64_t next_step_ = 0, next_arrival_ = 0;
  int64_t num_live_ = 0, num_held_ = 0, num_preempted_ = 0;  // requests; sequences
  int64_t forks_due_ = 0;                                    // running leaders whose prompt is launched
  bool preempting_ = false;                                  // in this step somebody lost blocks
  const Sequence* blocked_ = nullptr;  // the head of the queue did not fit at kv_.version() == blocked_at_
  uint64_t blocked_at_ = 0;
  SchedulerStats stats_;
};

}  // namespace quartz::engine
