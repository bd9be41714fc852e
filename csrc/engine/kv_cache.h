// The blocks of all groups and who has them: finds cached prefixes, grows and slides the tables of sequences, registers
// what was computed, forks, swaps. Every change that the device must follow is written into the plan.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/block_pool.h"
#include "engine/config.h"
#include "engine/prefix_tree.h"
#include "engine/request.h"
#include "engine/step_plan.h"

namespace quartz::engine {

class KvCache {
 public:
  explicit KvCache(const SchedulerConfig& config);

  // Empty tables; with caching the root of the namespace is pinned, so that what is computed can be registered.
  void open(SequenceKv* kv, std::string_view name_space);
  // Takes the longest cached prefix of at most `most` tokens; gives its length. Needs open(); an own state block has to
  // be restored by restore_state().
  int64_t match(SequenceKv* kv, const std::vector<int32_t>& tokens, int64_t most);
  // Of the last match(): the end of the text that the tree knows, whether or not all groups still have its blocks.
  struct Known {
    int32_t node = -1;
    int64_t blocks = 0;
  };
  Known known() const { return known_; }
  // Gives everything back, the last blocks first, so that the beginnings of prefixes stay cached longest.
  void release(SequenceKv* kv);

  // Blocks of group `g` still missing for keys up to `end`; of a sliding group, those that it has at one time.
  int64_t missing(const SequenceKv& kv, size_t g, int64_t end) const;
  // Up to which token keys would fit, with the blocks that it has and those that can be had; `spare` blocks of sliding
  // groups stay free. (What a prompt takes of full groups was counted when it came in.)
  int64_t room(const SequenceKv& kv, int64_t spare = 0) const;
  // Blocks for keys up to `end`, which room() allows. Written into the plan for `slot`.
  void grow(SequenceKv* kv, int64_t end, int32_t slot, StepPlan* plan);
  // Gives back what no query from `start` on sees.
  void slide(SequenceKv* kv, int64_t start);
  // The whole table of a sequence that got a slot.
  void upload(const SequenceKv& kv, int32_t slot, StepPlan* plan) const;

  // The first `computed` tokens are final and their keys in the blocks: full blocks can be found from now on.
  void commit(SequenceKv* kv, const std::vector<int32_t>& tokens, int64_t computed);

  // State groups: a new block starts from zero, or from the checkpoint that match() found.
  void start_state(SequenceKv* kv, StepPlan* plan);
  // A block that takes a copy of the state of `kv`, which is at `boundary` tokens, before the forward of this step; -1
  // if none is free or there is such a copy.
  int32_t checkpoint(const SequenceKv& kv, size_t g, int64_t boundary, StepPlan* plan);
  // The copy belongs to the node of `kv` now (`keep`), or is dropped.
  void end_checkpoint(SequenceKv* kv, size_t g, int32_t block, bool keep);
  // At the end of schedule(): what was only held so that the step may read it.
  void drop_held();

  // `child` shares the full blocks of `parent` up to `computed` tokens and gets a copy of the partial one and of
  // states.
  bool can_fork() const;  // one that computes its next token in the same step
  void fork(const SequenceKv& parent, SequenceKv* child, int64_t computed, StepPlan* plan);

  // Blocks with keys of at most `most` tokens go to host memory. False if there is no room for them.
  bool swap_out(SequenceKv* kv, int64_t most, StepPlan* plan);
  // Whether the blocks for `computed` tokens can be had now; then swap_in() brings them.
  bool can_swap_in(const SequenceKv& kv, int64_t computed) const;
  void swap_in(SequenceKv* kv, int64_t computed, StepPlan* plan);
  void drop_host(SequenceKv* kv);
  // Takes copies to host blocks that are free again out of a plan that was not launched.
  void drop_stale(StepPlan* plan) const;

  // Nothing that is cached now is found any more. Sequences forget their node with forget().
  void reset();
  void forget(SequenceKv* kv);

  size_t num_groups() const { return pools_.size(); }
  const BlockPool& pool(size_t g) const { return pools_[g]; }
  int64_t host_free(size_t g) const { return static_cast<int64_t>(host_free_[g].size()); }
  const PrefixTree& tree() const { return tree_; }
  bool has_states() const { return has_states_; }
  // Counts releases and registrations: while it stands still, what did not fit does not fit.
  uint64_t version() const { return version_; }
  int64_t evictions() const { return evictions_; }

  // Throws std::logic_error on a leak; `sequences` are all that have blocks, `checkpoints` those in launched plans.
  void check(const std::vector<const SequenceKv*>& sequences,
             const std::vector<StepPlan::Checkpoint>& checkpoints) const;

 private:
  int32_t take(size_t g);
  void put(size_t g, int32_t block);
  int64_t first_wanted(const SequenceKv& kv, size_t g, int64_t computed) const;
  int64_t columns(int64_t tokens) const { return ceil_div(tokens, config_.block_size); }

  SchedulerConfig config_;
  std::vector<BlockPool> pools_;
  std::vector<std::vector<int32_t>> host_free_;
  PrefixTree tree_;
  bool has_full_ = false, has_states_ = false;
  std::vector<int32_t> path_;                     // of match()
  std::vector<int64_t> run_;                      // of match(): cached blocks in a row, a group
  std::vector<std::pair<size_t, int32_t>> held_;  // group, block
  std::vector<int32_t> restore_;                  // of match(): checkpoint a group, -1 none
  Known known_;
  uint64_t version_ = 0;
  int64_t evictions_ = 0;
};

}  // namespace quartz::engine
