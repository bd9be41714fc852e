// Scheduler: what goes into one step. Running decodes come first, then chunks of running prompts, then the queue.
#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "engine/scheduler.h"

namespace quartz::engine {
namespace {

constexpr int kMostPassed = 32;    // sequences in the queue that wait for a prefix and are passed by in one step
constexpr int kMostWaits = 4;      // of one sequence
constexpr int64_t kLeastGain = 4;  // blocks

}  // namespace

std::shared_ptr<StepPlan> Scheduler::fresh_plan() {
  for (const auto& plan : plans_) {
    if (plan.use_count() == 1) {
      plan->clear();
      return plan;
    }
  }
  plans_.push_back(std::make_shared<StepPlan>());
  return plans_.back();
}

std::shared_ptr<StepPlan> Scheduler::schedule() {
  if (launched_.size() >= 2) {
    throw std::logic_error("quartz: Scheduler.schedule: two steps are in flight; update() the older one first");
  }
  if (num_live_ == 0) return nullptr;
  // Blocks that went to host memory in a call that found no rows in the end go with the next step that has some.
  const std::shared_ptr<StepPlan> plan = carried_ != nullptr ? std::move(carried_) : fresh_plan();
  carried_ = nullptr;
  if (!plan->swap_out.empty()) kv_.drop_stale(plan.get());
  plan->step_id = next_step_;
  preempting_ = false;
  int64_t rows = config_.max_num_batched_tokens;
  plan_decodes(plan.get(), &rows);
  plan_prefills(plan.get(), &rows);
  admit(plan.get(), &rows);
  kv_.drop_held();
  if (plan->entries.empty()) {
    if (!plan->swap_out.empty()) carried_ = plan;
    return nullptr;
  }
  plan->num_rows = std::accumulate(plan->query_len.begin(), plan->query_len.end(), int64_t{0});
  plan->released.assign(released_.begin(), released_.end());
  released_.clear();
  ++next_step_;
  ++stats_.steps;
  stats_.rows += plan->num_rows;
  launched_.push_back(plan);
  return plan;
}

void Scheduler::add_row(Sequence* sequence, StepPlan* plan, int32_t rows, int32_t drafts, bool samples) {
  plan->key.push_back(sequence->request->options.key);
  plan->index.push_back(sequence->rank.index);
  plan->slot.push_back(sequence->slot);
  plan->query_len.push_back(rows);
  plan->drafts.push_back(drafts);
  plan->samples.push_back(samples ? 1 : 0);
  plan->entries.push_back({sequence, sequence->residency, sequence->launched});
  sequence->last_step = plan->step_id;
  ++sequence->in_flight;
  ++sequence->request->in_flight;
  if (samples) {
    sequence->flight_most += 1 + drafts;
  }
}

void Scheduler::add_decode(Sequence* sequence, int32_t drafts, StepPlan* plan) {
  plan->kind.push_back(1);
  plan->start.push_back(-1);
  plan->max_length.push_back(static_cast<int32_t>(sequence->most_length() + drafts));
  plan->logits_from.push_back(-1);
  add_row(sequence, plan, 1 + drafts, drafts, true);
}

void Scheduler::add_chunk(Sequence* sequence, int64_t chunk, StepPlan* plan) {
  const Request& request = *sequence->request;
  const int64_t start = sequence->launched, end = start + chunk;
  int64_t logits_from = -1;
  if (request.options.logits_from >= 0 && request.leader == sequence->rank.index) {
    // The logits of the last token of the prompt are the first output, not the prompt's.
    const int64_t wanted = std::max({request.options.logits_from, sequence->logits_done, start});
    if (wanted < std::min(end, request.prompt_length - 1)) logits_from = wanted;
  }
  sequence->launched = end;
  const bool last = end == sequence->target;
  if (last) {
    sequence->decoding = true;
    if (!request.forked) ++forks_due_;
  }
  plan->kind.push_back(0);
  plan->start.push_back(static_cast<int32_t>(start));
  plan->max_length.push_back(static_cast<int32_t>(end));
  plan->logits_from.push_back(static_cast<int32_t>(logits_from));
  add_row(sequence, plan, static_cast<int32_t>(chunk), 0, last && end == sequence->length());
}

int64_t Scheduler::chunk_of(const Sequence& sequence, int64_t rows) const {
  int64_t chunk = std::min(sequence.target - sequence.launched, rows);
  if (config_.max_prefill_tokens_per_request > 0) chunk = std::min(chunk, config_.max_prefill_tokens_per_request);
  if (kv_.has_states() && config_.enable_prefix_caching) {
    // A recurrent state can be kept where a chunk ends, and found again only at the end of a block: chunks end there,
    // and the rest of the prompt is one of its own.
    int64_t end = std::min(sequence.launched + chunk, sequence.length() - 1);
    if (sequence.branch_node >= 0 && sequence.launched < sequence.branch) end = std::min(end, sequence.branch);
    const int64_t aligned = end / config_.block_size * config_.block_size;
    if (aligned > sequence.launched) chunk = aligned - sequence.launched;
  }
  return chunk;
}

int64_t Scheduler::chunk_that_fits(const Sequence& sequence, int64_t rows) const {
  const int64_t room = kv_.room(sequence.kv, spare()) - sequence.launched;
  return std::max<int64_t>(1, std::min(chunk_of(sequence, rows), room));
}

// Decodes grow: some blocks stay free for them, or they would preempt what comes in.
int64_t Scheduler::spare() const { return ceil_div(static_cast<int64_t>(running_.size()), 4); }

void Scheduler::plan_decodes(StepPlan* plan, int64_t* rows) {
  decodes_.clear();
  planner_.begin();
  int64_t prompts = 0, prompt_rows = 0;
  for (Sequence* sequence : running_) {
    if (!sequence->decoding) {
      ++prompts;
      prompt_rows += chunk_of(*sequence, *rows);
      continue;
    }
    // It may be at its end already: one step of waiting tells, and nothing is written behind the limit.
    const int64_t room = sequence->request->limit - 1 - sequence->most_length();
    if (room < 0) continue;
    int64_t drafts = sequence->request->forked ? std::min(sequence->request->options.drafts, room) : 0;
    if (sequence->in_flight == 0 && sequence->available >= 0) drafts = std::min<int64_t>(drafts, sequence->available);
    if (!sequence->request->forked) prompts += sequence->request->live - 1;
    decodes_.push_back(sequence);
    planner_.add(sequence, static_cast<int32_t>(drafts));
  }
  if (!waiting_.empty() && !free_slots_.empty()) {
    ++prompts;
    prompt_rows += (*waiting_.begin())->length();
  }
  const auto count = static_cast<int64_t>(decodes_.size());
  // Prompts go on, and samples of a prompt begin, with at least a row each while decodes verify drafts.
  planner_.plan(count + std::min(prompt_rows, *rows - count), std::max<int64_t>(0, *rows - count - prompts),
                &draft_lengths_);
  for (size_t i = 0; i < decodes_.size(); ++i) {
    Sequence* sequence = decodes_[i];
    if (sequence->state != State::kRunning) continue;  // made room for a better one
    const int64_t keys = sequence->most_length();
    // A step in flight that cannot draw a token leaves it where it is.
    slide(sequence, sequence->length() - 1, keys);
    if (!make_room(sequence, keys, plan)) {
      // With its length known it may need less. The first one has nobody to wait for and never gets here.
      if (sequence->in_flight == 0 && running_.front() != sequence) preempt(sequence, plan);
      continue;
    }
    const auto drafts = static_cast<int32_t>(std::min<int64_t>(draft_lengths_[i], kv_.room(sequence->kv) - keys));
    kv_.grow(&sequence->kv, keys + drafts, sequence->slot, plan);
    add_decode(sequence, drafts, plan);
    *rows -= 1 + drafts;
    if (!sequence->request->forked) fork(sequence, plan, rows);
  }
}

void Scheduler::plan_prefills(StepPlan* plan, int64_t* rows) {
  for (size_t i = 0; i < running_.size() && *rows > 0; ++i) {
    Sequence* sequence = running_[i];
    if (sequence->decoding || sequence->last_step == plan->step_id) continue;
    slide(sequence, sequence->launched, sequence->launched + chunk_of(*sequence, *rows));
    if (!make_room(sequence, sequence->launched + 1, plan)) continue;
    const int64_t chunk = chunk_that_fits(*sequence, *rows);
    if (sequence->launched > 0 && sequence->launched % config_.block_size == 0) {
      for (size_t g = 0; kv_.has_states() && g < kv_.num_groups(); ++g) {
        const int32_t block = kv_.checkpoint(sequence->kv, g, sequence->launched, plan);
        if (block < 0) continue;
        plan->checkpoints.push_back(
            {sequence, sequence->residency, static_cast<int32_t>(g), block, sequence->launched});
      }
    }
    kv_.grow(&sequence->kv, sequence->launched + chunk, sequence->slot, plan);
    add_chunk(sequence, chunk, plan);
    *rows -= chunk;
  }
}

// Blocks that the window has passed are kept until their tokens are registered, one step longer, if there is room for
// `keys` then: a block that is given back before cannot be found again.
void Scheduler::slide(Sequence* sequence, int64_t start, int64_t keys) {
  kv_.slide(&sequence->kv, std::min(start, sequence->computed));
  if (kv_.room(sequence->kv, spare()) < keys) kv_.slide(&sequence->kv, start);
}

bool Scheduler::make_room(Sequence* sequence, int64_t tokens, StepPlan* plan) {
  while (kv_.room(sequence->kv) < tokens) {
    // The last in rank that is not in this step yet.
    Sequence* victim = nullptr;
    for (size_t i = running_.size(); i-- > 0 && victim == nullptr;) {
      if (!(sequence->rank < running_[i]->rank)) break;
      if (running_[i]->last_step != plan->step_id) victim = running_[i];
    }
    if (victim == nullptr) return false;
    preempt(victim, plan);
  }
  return true;
}

void Scheduler::preempt(Sequence* sequence, StepPlan* plan) {
  preempting_ = true;
  ++stats_.preemptions;
  // What is in the blocks for sure once the launched steps have run; drafts that were refused may lie behind it.
  const int64_t keys = sequence->decoding ? sequence->most_length() : sequence->launched;
  if (config_.preemption == Preemption::kSwap && kv_.swap_out(&sequence->kv, keys, plan)) {
    ++stats_.swaps_out;
    plan->swapped.push_back({sequence->request->options.key, sequence->rank.index, sequence->residency});
    leave(sequence);
    sequence->available = -1;
    sequence->preempted = true;
    ++num_preempted_;
    enqueue(sequence);
    return;
  }
  requeue(sequence);
}

void Scheduler::enter(Sequence* sequence, int64_t cached, StepPlan* plan) {
  sequence->state = State::kRunning;
  sequence->slot = free_slots_.back();
  free_slots_.pop_back();
  if (sequence->preempted) --num_preempted_;
  sequence->preempted = false;
  sequence->admitted = true;
  running_.insert(std::lower_bound(running_.begin(), running_.end(), sequence, ByRank()), sequence);
  plan->new_sequences.push_back({sequence->slot, sequence->request->options.key, sequence->rank.index, cached});
  kv_.upload(sequence->kv, sequence->slot, plan);
}

void Scheduler::fork(Sequence* leader, StepPlan* plan, int64_t* rows) {
  Request* request = leader->request;
  const int64_t computed = request->prompt_length - 1;
  --forks_due_;
  request->forked = true;
  for (Sequence& child : request->sequences) {
    if (child.state != State::kHeld) continue;
    enqueue(&child);
    // Without room now it waits like any other and computes the prompt itself, or finds it in the prefix cache.
    if (computed == 0 || *rows == 0 || free_slots_.empty() || !kv_.can_fork()) continue;
    waiting_.erase(&child);
    kv_.open(&child.kv, request->options.name_space);
    kv_.fork(leader->kv, &child.kv, computed, plan);
    child.launched = child.computed = child.target = computed;
    child.decoding = true;
    enter(&child, computed, plan);
    plan->forked.push_back({leader->slot, child.slot, request->options.key, child.rank.index});
    kv_.grow(&child.kv, computed + 1, child.slot, plan);
    add_decode(&child, 0, plan);
    --*rows;
    ++stats_.forks;
  }
}

void Scheduler::admit(StepPlan* plan, int64_t* rows) {
  if (preempting_ || waiting_.empty()) return;
  for (size_t g = 0; g < kv_.num_groups(); ++g) {
    reserved_[g] = config_.groups[g].kind == GroupKind::kState ? 0 : spare();
    for (const Sequence* sequence : running_) {
      if (!sequence->decoding) reserved_[g] += kv_.missing(sequence->kv, g, sequence->target + 1);
    }
  }
  int passed = 0;
  for (auto next = waiting_.begin(); next != waiting_.end() && *rows > 0 && !free_slots_.empty();) {
    Sequence* head = *next++;
    if (head->in_flight > 0) return;
    if (blocked_ == head && blocked_at_ == kv_.version() && !running_.empty()) return;
    const Admission admission = still_waits(head) ? Admission::kLater : admit_one(head, plan, rows);
    if (admission == Admission::kNoRoom) {
      blocked_ = head;
      blocked_at_ = kv_.version();
      return;
    }
    // Those behind it may have other prompts; but looking at all of a long queue would take too long.
    if (admission == Admission::kLater && ++passed == kMostPassed) return;
    if (admission == Admission::kDone) next = waiting_.upper_bound(head);  // its other samples may have come in behind
  }
}

bool Scheduler::still_waits(Sequence* sequence) {
  if (sequence->wait.key < 0) return false;
  const Sequence* other = find(sequence->wait.key, sequence->wait.index);
  if (other != nullptr && other->state == State::kRunning && other->residency == sequence->wait.residency &&
      other->computed < sequence->wait.keys) {
    return true;
  }
  sequence->wait.key = -1;
  return false;
}

// Whether a running sequence is computing more of the prompt than match() found: it is done once, for both.
bool Scheduler::wait_for_prefix(Sequence* sequence, int64_t cached, int64_t most) {
  const KvCache::Known known = kv_.known();
  if (known.node < 0 || sequence->waits == kMostWaits) return false;
  const int64_t size = config_.block_size, at = known.blocks * size;
  const int32_t* tokens = sequence->tokens.data();
  for (const Sequence* other : running_) {
    int64_t keys = 0;
    if (other->kv.node == known.node && at + size <= std::min(most, other->target) &&
        std::equal(tokens + at, tokens + at + size, other->tokens.begin() + at)) {
      const int64_t end = std::min(most, other->target);
      keys = std::mismatch(tokens + at, tokens + end, other->tokens.begin() + at).first - tokens;
      keys = keys / size * size;
    } else if (other->branch_node == known.node && other->branch == at) {
      keys = at + 1;  // its state at the branch can be found when it has gone on
    }
    // Waiting takes two steps: a few tokens are computed sooner than that.
    const int64_t gain = keys - cached;
    if (other->computed >= keys || gain < kLeastGain * size || 4 * gain < sequence->target - cached) continue;
    ++sequence->waits;
    ++stats_.prefix_waits;
    sequence->wait = {other->request->options.key, other->rank.index, other->residency, keys};
    return true;
  }
  return false;
}

int64_t Scheduler::most_cached(const Sequence& sequence, int64_t target) const {
  const RequestOptions& options = sequence.request->options;
  const int64_t most = std::min(target, sequence.length() - 1);  // the last token is computed: its logits are needed
  if (options.logits_from >= 0 && sequence.request->leader == sequence.rank.index) {
    return std::min(most, std::max(options.cache_read ? options.logits_from : 0, sequence.logits_done));
  }
  return options.cache_read ? most : 0;
}

Scheduler::Admission Scheduler::admit_one(Sequence* sequence, StepPlan* plan, int64_t* rows) {
  Request* request = sequence->request;
  const bool leads = !request->forked;
  const int64_t target = leads ? request->prompt_length - 1 : sequence->length();
  const bool swapped = sequence->kv.swapped;
  int64_t cached = sequence->computed;
  if (!swapped) {
    const int64_t most = most_cached(*sequence, target);
    sequence->target = target;
    kv_.open(&sequence->kv, request->options.name_space);
    cached = kv_.match(&sequence->kv, sequence->tokens, most);
    if (wait_for_prefix(sequence, cached, most)) {
      kv_.release(&sequence->kv);
      return Admission::kLater;
    }
    sequence->branch_node = -1;
    if (kv_.has_states() && kv_.known().blocks * config_.block_size > cached) {
      sequence->branch = kv_.known().blocks * config_.block_size;
      sequence->branch_node = kv_.known().node;
    }
  }
  bool fits = swapped ? kv_.can_swap_in(sequence->kv, cached) : kv_.room(sequence->kv) > cached;
  for (size_t g = 0; g < kv_.num_groups() && fits && !running_.empty(); ++g) {
    fits = kv_.pool(g).num_available() - kv_.missing(sequence->kv, g, target + 1) >= reserved_[g];
  }
  if (!fits) {
    if (!swapped) kv_.release(&sequence->kv);
    return Admission::kNoRoom;
  }
  waiting_.erase(sequence);
  if (!sequence->admitted) {
    stats_.prefix_queries += sequence->length();
    stats_.prefix_hits += cached;
  } else if (!swapped) {
    stats_.resumed_hits += cached;
  }
  sequence->target = target;
  sequence->launched = sequence->computed = cached;
  sequence->decoding = cached == sequence->length() - 1;
  if (swapped) {
    kv_.swap_in(&sequence->kv, cached, plan);
    ++stats_.swaps_in;
  }
  enter(sequence, cached, plan);
  kv_.slide(&sequence->kv, cached);
  const int64_t chunk = sequence->decoding ? 1 : chunk_that_fits(*sequence, *rows);
  kv_.grow(&sequence->kv, cached + chunk, sequence->slot, plan);
  if (!swapped) kv_.start_state(&sequence->kv, plan);
  if (sequence->decoding) {
    // The whole prompt but its last token is there: the other samples find it in the prefix cache too.
    if (leads) {
      request->forked = true;
      for (Sequence& child : request->sequences) {
        if (child.state == State::kHeld) enqueue(&child);
      }
    }
    add_decode(sequence, 0, plan);
  } else {
    add_chunk(sequence, chunk, plan);
    for (size_t g = 0; g < kv_.num_groups(); ++g) reserved_[g] += kv_.missing(sequence->kv, g, target + 1);
  }
  *rows -= chunk;
  return Admission::kDone;
}

}  // namespace quartz::engine
