// How many drafts of each sequence are verified in a step. The rule is that of quartz::spec_schedule: most expected
// tokens for the time of the step; the choice changes speed, never tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/request.h"

namespace quartz::engine {

class DraftPlanner {
 public:
  DraftPlanner(int64_t max_drafts, int64_t max_num_seqs, bool adaptive);

  // Times of steps of 0, 1, ... rows, any unit; those not above 0 are not chosen. Until it is called, or without
  // `adaptive`, every draft that fits is verified.
  void set_step_times(std::vector<float> times) { times_ = std::move(times); }

  void begin() { sequences_.clear(), most_.clear(); }
  void add(const Sequence* sequence, int32_t most) { sequences_.push_back(sequence), most_.push_back(most); }
  // Writes one length a sequence, in all at most `rows`; `others` rows are in the step without them, decodes included.
  void plan(int64_t others, int64_t rows, std::vector<int32_t>* lengths);

  // A fresh sequence; what verification of `planned` drafts told.
  static void start(Sequence* sequence);
  static void observe(Sequence* sequence, int32_t planned, int32_t accepted);

 private:
  int64_t max_drafts_;
  bool adaptive_;
  std::vector<float> times_;
  std::vector<const Sequence*> sequences_;
  std::vector<int32_t> most_;
  std::vector<uint64_t> keys_;
};

}  // namespace quartz::engine
