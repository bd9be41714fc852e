#include "engine/draft_planner.h"

#include <algorithm>
#include <functional>

#include "kernels/spec_schedule.h"

namespace quartz::engine {
namespace {

// Before anything is known about a sequence, and where the average drifts to while none of its drafts is verified, so
// that it is tried again after some steps.
constexpr float kPrior = 0.6f;
constexpr float kWeight = 0.15f;      // of the newest observation
constexpr float kForget = 1.0f / 64;  // towards the prior, a step without drafts

}  // namespace

DraftPlanner::DraftPlanner(int64_t max_drafts, int64_t max_num_seqs, bool adaptive)
    : max_drafts_(max_drafts), adaptive_(adaptive) {
  keys_.reserve(static_cast<size_t>(std::min<int64_t>(max_drafts * max_num_seqs, 1 << 20)));
}

void DraftPlanner::plan(int64_t others, int64_t rows, std::vector<int32_t>* lengths) {
  const size_t n = sequences_.size();
  lengths->assign(n, 0);
  if (max_drafts_ == 0 || n == 0) return;
  if (!adaptive_ || times_.empty()) {
    int64_t wanted = 0;
    for (const int32_t most : most_) wanted += most;
    if (wanted <= rows) {
      *lengths = most_;
      return;
    }
    for (int32_t depth = 0; depth < max_drafts_; ++depth) {  // rows are short: first drafts before second ones
      for (size_t i = 0; i < n; ++i) {
        if (depth < most_[i] && rows > 0) ++(*lengths)[i], --rows;
      }
    }
    return;
  }
  keys_.clear();
  for (size_t i = 0; i < n; ++i) {
    const Sequence& s = *sequences_[i];
    float chance = 1.0f;
    for (int32_t j = 0; j < most_[i]; ++j) {
      const float given =
          static_cast<size_t>(j) < s.confidences.size() ? s.confidences[static_cast<size_t>(j)] : s.acceptance;
      chance *= given > 0.0f ? std::min(given, 1.0f) : 0.0f;
      if (chance <= 0.0f) break;  // adds nothing
      keys_.push_back(kernels::schedule_key(chance, static_cast<int64_t>(i) * max_drafts_ + j));
    }
  }
  std::sort(keys_.begin(), keys_.end(), std::greater<uint64_t>());
  const auto gain = [&](int64_t count, uint64_t mass) {
    const int64_t step = others + count;
    const float time = step < static_cast<int64_t>(times_.size()) ? times_[static_cast<size_t>(step)] : 0.0f;
    if (!(time > 0.0f)) return -1.0;
    return static_cast<double>((static_cast<uint64_t>(n) << 40) + mass) / static_cast<double>(time);
  };
  uint64_t mass = 0;
  double best = gain(0, 0);
  size_t chosen = 0;
  for (size_t i = 0; i < keys_.size() && static_cast<int64_t>(i) < rows; ++i) {
    mass += kernels::schedule_mass(kernels::schedule_chance(keys_[i]));
    const double here = gain(static_cast<int64_t>(i) + 1, mass);
    if (here > best) best = here, chosen = i + 1;
  }
  for (size_t i = 0; i < chosen; ++i)
    ++(*lengths)[static_cast<size_t>(kernels::schedule_index(keys_[i]) / max_drafts_)];
}

void DraftPlanner::start(Sequence* sequence) {
  sequence->acceptance = kPrior;
  sequence->available = -1;
  sequence->confidences.clear();
}

void DraftPlanner::observe(Sequence* sequence, int32_t planned, int32_t accepted) {
  float& p = sequence->acceptance;
  if (planned == 0) p += kForget * (kPrior - p);
  for (int32_t j = 0; j < std::min(accepted, planned); ++j) p += kWeight * (1.0f - p);
  if (accepted < planned) p -= kWeight * p;
}

}  // namespace quartz::engine
