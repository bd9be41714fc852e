// What a step does, as arrays that the binding shows without a copy, and what update() has to know about it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/request.h"

namespace quartz::engine {

enum StateOp : int32_t { kZeroState = 0, kCopyState = 1 };

struct NewSequence {
  int32_t slot;
  int64_t key;
  int32_t index;
  int64_t cached;  // tokens whose keys are there without computing
};

struct ForkedSequence {
  int32_t parent_slot, slot;
  int64_t key;
  int32_t index;
};

struct StepPlan {
  int64_t step_id = 0, num_rows = 0;
  // One entry a scheduled sequence.
  std::vector<int64_t> key;
  std::vector<int32_t> slot, index, query_len, start, drafts, samples, kind, max_length, logits_from;

  std::vector<NewSequence> new_sequences;
  std::vector<ForkedSequence> forked;
  std::vector<int32_t> released;
  std::vector<std::array<int32_t, 4>> table_updates;  // group, slot, column, block
  std::vector<std::array<int32_t, 3>> copies;         // group, from, to
  std::vector<std::array<int32_t, 3>> swap_out;       // group, block, host block
  std::vector<std::array<int32_t, 3>> swap_in;
  std::vector<std::array<int32_t, 4>> state_ops;  // StateOp, group, from, to

  // For update().
  struct Entry {
    Sequence* sequence;
    uint32_t residency;
    int64_t chunk_end;  // prefill: tokens in the cache behind this chunk
  };
  std::vector<Entry> entries;
  // Copies of recurrent states that become findable when the step has run: at `boundary` tokens of the sequence.
  struct Checkpoint {
    Sequence* sequence;
    uint32_t residency;
    int32_t group, block;
    int64_t boundary;
  };
  std::vector<Checkpoint> checkpoints;
  struct Swapped {
    int64_t key;
    int32_t index;
    uint32_t residency;
  };
  std::vector<Swapped> swapped;  // whose blocks go to host memory in this step

  void clear() {
    num_rows = 0;
    key.clear();
    for (auto* column : {&slot, &index, &query_len, &start, &drafts, &samples, &kind, &max_length, &logits_from}) {
      column->clear();
    }
    new_sequences.clear();
    forked.clear();
    released.clear();
    table_updates.clear();
    copies.clear();
    swap_out.clear();
    swap_in.clear();
    state_ops.clear();
    entries.clear();
    checkpoints.clear();
    swapped.clear();
  }
};

struct StepError {
  int64_t key;
  int32_t index;
  std::string reason;
};

// What became of the tokens of a step; one entry a scheduled sequence, in the order of the plan.
struct StepOutput {
  std::vector<int64_t> key;
  std::vector<int32_t> index, num_tokens, finished, stop_token;
  std::vector<StepError> errors;
};

}  // namespace quartz::engine
