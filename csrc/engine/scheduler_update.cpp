// Scheduler: what became of a step.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "engine/scheduler.h"

namespace quartz::engine {

void Scheduler::check_tokens(const StepPlan& plan, const int32_t* tokens, int64_t rows, int64_t columns) const {
  constexpr const char* kCall = "update";
  if (rows != static_cast<int64_t>(plan.entries.size())) {
    refuse(kCall, "tokens",
           "must have a row for each of the " + std::to_string(plan.entries.size()) + " sequences of the step", rows);
  }
  if (columns != 1 + config_.max_drafts) {
    refuse(kCall, "tokens", "must have 1 + max_drafts = " + std::to_string(1 + config_.max_drafts) + " columns",
           columns);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const auto row = static_cast<size_t>(i);
    const int32_t most = plan.samples[row] != 0 ? 1 + plan.drafts[row] : 0;
    for (int64_t j = most; j < columns; ++j) {
      if (tokens[i * columns + j] < 0) continue;
      refuse(kCall, "tokens[" + std::to_string(i) + ", " + std::to_string(j) + "]",
             "must be -1: the step draws at most " + std::to_string(most) + " tokens of this sequence",
             tokens[i * columns + j]);
    }
  }
}

void Scheduler::settle(const StepPlan& plan, size_t i) {
  Sequence* sequence = plan.entries[i].sequence;
  --sequence->in_flight;
  --sequence->request->in_flight;
  if (plan.samples[i] != 0) sequence->flight_most -= 1 + plan.drafts[i];
}

Finish Scheduler::commit(Sequence* sequence, const int32_t* tokens, int32_t count, int32_t* kept, int32_t* stop) {
  const Request& request = *sequence->request;
  const auto& stops = request.options.stop_ids;
  for (int32_t j = 0; j < count; ++j) {
    sequence->tokens.push_back(tokens[j]);
    *kept = j + 1;
    const int64_t output = sequence->length() - request.prompt_length;
    if (output >= request.options.min_tokens && std::find(stops.begin(), stops.end(), tokens[j]) != stops.end()) {
      *stop = tokens[j];
      return Finish::kStop;
    }
    if (sequence->length() >= request.limit) return Finish::kLength;
  }
  return Finish::kNone;
}

StepOutput Scheduler::update(int64_t step_id, const int32_t* tokens, int64_t rows, int64_t columns,
                             const int32_t* available, const float* confidences) {
  if (launched_.empty() || launched_.front()->step_id != step_id) {
    const std::string oldest = launched_.empty() ? "none is" : std::to_string(launched_.front()->step_id);
    refuse("update", "step_id", "must be the oldest step in flight (" + oldest + ")", step_id);
  }
  check_tokens(*launched_.front(), tokens, rows, columns);
  const std::shared_ptr<StepPlan> plan = std::move(launched_.front());
  launched_.pop_front();

  for (const auto& checkpoint : plan->checkpoints) {
    Sequence* s = checkpoint.sequence;
    const bool keep =
        s->residency == checkpoint.residency && s->kv.registered * config_.block_size == checkpoint.boundary;
    kv_.end_checkpoint(&s->kv, static_cast<size_t>(checkpoint.group), checkpoint.block, keep);
  }
  plan->checkpoints.clear();

  StepOutput output;
  const auto n = static_cast<size_t>(rows);
  output.key = plan->key;
  output.index = plan->index;
  output.num_tokens.assign(n, 0);
  output.finished.assign(n, 0);
  output.stop_token.assign(n, -1);
  for (size_t i = 0; i < n; ++i) {
    const StepPlan::Entry& entry = plan->entries[i];
    Sequence* sequence = entry.sequence;
    settle(*plan, i);
    if (sequence->state == State::kFinished) {
      output.finished[i] = static_cast<int32_t>(Finish::kAborted);
      drop_if_done(sequence->request);
      continue;
    }
    const int32_t* row = tokens + static_cast<int64_t>(i) * columns;
    const bool resident = entry.residency == sequence->residency;
    if (plan->kind[i] == 0) {
      sequence->logits_done = std::max(sequence->logits_done, entry.chunk_end);
      if (resident) sequence->computed = entry.chunk_end;
    }
    Finish finish = Finish::kNone;
    if (plan->samples[i] != 0) {
      int32_t count = 0;
      while (count <= plan->drafts[i] && row[count] >= 0) ++count;
      if (count == 0) {
        output.errors.push_back({plan->key[i], plan->index[i],
                                 "no token could be drawn at position " + std::to_string(sequence->length()) +
                                     ": every logit was NaN or -inf"});
        output.finished[i] = static_cast<int32_t>(Finish::kError);
        end(sequence);
        continue;
      }
      const int64_t before = sequence->length();
      finish = commit(sequence, row, count, &output.num_tokens[i], &output.stop_token[i]);
      // Accepted drafts have their keys in the cache, the last token has not; none behind the end counts.
      if (resident) sequence->computed = std::min(before - 1 + count, sequence->length());
      stats_.tokens += output.num_tokens[i];
      stats_.drafts_verified += plan->drafts[i];
      stats_.drafts_accepted += count - 1;
      if (config_.max_drafts > 0) {
        DraftPlanner::observe(sequence, plan->drafts[i], count - 1);
        if (available != nullptr) {
          sequence->available = std::clamp<int32_t>(available[i], 0, static_cast<int32_t>(config_.max_drafts));
        }
        if (confidences != nullptr) {
          const float* from = confidences + static_cast<int64_t>(i) * config_.max_drafts;
          sequence->confidences.assign(from, from + config_.max_drafts);
        }
      }
    }
    if (resident && !sequence->kv.swapped) kv_.commit(&sequence->kv, sequence->tokens, sequence->computed);
    if (finish != Finish::kNone) {
      output.finished[i] = static_cast<int32_t>(finish);
      end(sequence);
    }
  }
  plan->entries.clear();
  return output;
}

void Scheduler::discard(int64_t step_id) {
  const auto found =
      std::find_if(launched_.begin(), launched_.end(), [&](const auto& plan) { return plan->step_id == step_id; });
  if (found == launched_.end()) refuse("discard", "step_id", "must be a step in flight", step_id);
  const auto first = found - launched_.begin();
  while (static_cast<int64_t>(launched_.size()) > first) {
    const std::shared_ptr<StepPlan> plan = std::move(launched_.back());
    launched_.pop_back();
    ++stats_.discarded_steps;
    for (const auto& checkpoint : plan->checkpoints) {
      kv_.end_checkpoint(&checkpoint.sequence->kv, static_cast<size_t>(checkpoint.group), checkpoint.block, false);
    }
    plan->checkpoints.clear();
    for (size_t i = 0; i < plan->entries.size(); ++i) {
      const StepPlan::Entry& entry = plan->entries[i];
      Sequence* sequence = entry.sequence;
      settle(*plan, i);
      if (sequence->state == State::kFinished) {
        drop_if_done(sequence->request);
      } else if (entry.residency == sequence->residency) {
        if (sequence->state == State::kRunning) {
          requeue(sequence);
        } else {
          kv_.drop_host(&sequence->kv);
          kv_.release(&sequence->kv);
          sequence->launched = sequence->computed = 0;
          ++sequence->residency;
        }
      }
    }
    plan->entries.clear();
    // Their blocks were to be copied to host memory in this step.
    for (const auto& swapped : plan->swapped) {
      Sequence* sequence = find(swapped.key, swapped.index);
      if (sequence == nullptr || !sequence->kv.swapped || sequence->residency != swapped.residency) continue;
      kv_.drop_host(&sequence->kv);
      kv_.release(&sequence->kv);
      sequence->launched = sequence->computed = 0;
      ++sequence->residency;
    }
    for (const int32_t slot : plan->released) {
      const bool free = std::find(free_slots_.begin(), free_slots_.end(), slot) != free_slots_.end();
      if (free && std::find(released_.begin(), released_.end(), slot) == released_.end()) released_.push_back(slot);
    }
  }
}

}  // namespace quartz::engine
