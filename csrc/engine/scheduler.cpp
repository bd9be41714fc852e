#include "engine/scheduler.h"

#include <algorithm>
#include <stdexcept>

namespace quartz::engine {
namespace {

const SchedulerConfig& checked(const SchedulerConfig& config) {
  validate(config);
  return config;
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : config_(checked(config)),
      kv_(config_),
      planner_(config_.max_drafts, config_.max_num_seqs, config_.adaptive_drafts),
      reserved_(config_.groups.size(), 0) {
  // Every running sequence must have a row in every step, so that nobody waits.
  const int64_t slots = std::min(config_.max_num_seqs, config_.max_num_batched_tokens);
  for (int64_t slot = slots; slot-- > 0;) free_slots_.push_back(static_cast<int32_t>(slot));
  running_.reserve(static_cast<size_t>(slots));
  decodes_.reserve(static_cast<size_t>(slots));
}

Scheduler::~Scheduler() = default;

int64_t Scheduler::max_sequence_tokens() const {
  // The last token is never a key.
  return std::min(config_.max_model_len, capacity_tokens(config_) + 1);
}

void Scheduler::add_request(const RequestOptions& options, const int32_t* prompt, int64_t length) {
  constexpr const char* kCall = "add_request";
  if (length < 1) refuse(kCall, "prompt", "must have at least one token", length);
  if (length > config_.max_model_len - 1) {
    refuse(kCall, "prompt",
           "must have at most max_model_len - 1 = " + std::to_string(config_.max_model_len - 1) +
               " tokens, so that one more fits",
           length);
  }
  if (length > max_sequence_tokens() - 1) {
    refuse(kCall, "prompt",
           "can never fit into the blocks of the cache, which hold " + std::to_string(capacity_tokens(config_)) +
               " tokens",
           length);
  }
  for (int64_t i = 0; i < length; ++i) {
    if (prompt[i] < 0) {
      refuse(kCall, "prompt[" + std::to_string(i) + "]", "must be a token id, 0 or greater", prompt[i]);
    }
  }
  if (options.max_tokens < 1) refuse(kCall, "max_tokens", "must be at least 1", options.max_tokens);
  if (options.min_tokens < 0 || options.min_tokens > options.max_tokens) {
    refuse(kCall, "min_tokens", "must be from 0 to max_tokens = " + std::to_string(options.max_tokens),
           options.min_tokens);
  }
  if (options.n < 1 || options.n > 65536) refuse(kCall, "n", "must be from 1 to 65536", options.n);
  if (options.drafts < -1 || options.drafts > config_.max_drafts) {
    refuse(kCall, "drafts", "must be from 0 to max_drafts = " + std::to_string(config_.max_drafts), options.drafts);
  }
  if (options.logits_from < -1 || options.logits_from >= length) {
    refuse(kCall, "logits_from",
           "must be -1 or a position of the prompt, which has " + std::to_string(length) + " tokens",
           options.logits_from);
  }
  if (config_.policy == Policy::kFcfs && options.priority != 0) {
    refuse(kCall, "priority", "must be 0 under policy \"fcfs\"", options.priority);
  }
  for (const int32_t id : options.stop_ids) {
    if (id < 0) refuse(kCall, "stop_ids", "must be token ids, 0 or greater", id);
  }
  if (requests_.count(options.key) > 0) {
    refuse(kCall, "key", "must not be the key of a request that is unfinished or has rows in flight", options.key);
  }

  auto owned = std::make_unique<Request>();
  Request* request = owned.get();
  request->options = options;
  if (options.drafts < 0) request->options.drafts = config_.max_drafts;
  request->prompt_length = length;
  request->limit = std::min(max_sequence_tokens(), length + std::min<int64_t>(options.max_tokens, 1 << 30));
  request->forked = options.n == 1;
  request->live = options.n;
  request->sequences.resize(static_cast<size_t>(options.n));
  const int64_t arrival = next_arrival_++;
  for (int64_t i = 0; i < options.n; ++i) {
    Sequence& sequence = request->sequences[static_cast<size_t>(i)];
    sequence.request = request;
    sequence.rank = {options.priority, arrival, static_cast<int32_t>(i)};
    DraftPlanner::start(&sequence);
  }
  request->sequences[0].tokens.assign(prompt, prompt + length);
  num_held_ += options.n;
  requests_.emplace(options.key, std::move(owned));
  ++num_live_;
  enqueue(&request->sequences[0]);
}

void Scheduler::enqueue(Sequence* sequence) {
  if (sequence->state == State::kHeld) {
    --num_held_;
    // Its request's prompt, which the leader has.
    if (sequence->tokens.empty()) {
      const auto& prompt = sequence->request->sequences[static_cast<size_t>(sequence->request->leader)].tokens;
      sequence->tokens.assign(prompt.begin(), prompt.begin() + sequence->request->prompt_length);
    }
  }
  sequence->state = State::kWaiting;
  waiting_.insert(sequence);
}

void Scheduler::lead(Request* request) {
  for (Sequence& sequence : request->sequences) {
    if (sequence.state != State::kHeld) continue;
    enqueue(&sequence);
    request->leader = sequence.rank.index;
    request->forked = request->live == 1;
    return;
  }
}

Sequence* Scheduler::find(int64_t key, int64_t index) const {
  const auto found = requests_.find(key);
  if (found == requests_.end() || index < 0 || index >= found->second->options.n) return nullptr;
  return &found->second->sequences[static_cast<size_t>(index)];
}

void Scheduler::leave(Sequence* sequence) {
  if (sequence->decoding && !sequence->request->forked) --forks_due_;
  running_.erase(std::lower_bound(running_.begin(), running_.end(), sequence, ByRank()));
  free_slots_.push_back(sequence->slot);
  released_.push_back(sequence->slot);
  sequence->slot = -1;
  sequence->decoding = false;
}

void Scheduler::requeue(Sequence* sequence) {
  leave(sequence);
  kv_.release(&sequence->kv);
  sequence->launched = sequence->computed = 0;
  ++sequence->residency;
  sequence->available = -1;
  sequence->preempted = true;
  ++num_preempted_;
  enqueue(sequence);
}

void Scheduler::end(Sequence* sequence) {
  Request* request = sequence->request;
  const State was = sequence->state;
  if (was == State::kFinished) return;
  if (was == State::kRunning) {
    leave(sequence);
  } else if (was == State::kWaiting) {
    waiting_.erase(sequence);
    if (sequence->preempted) --num_preempted_;
  } else {
    --num_held_;
  }
  if (blocked_ == sequence) blocked_ = nullptr;
  kv_.drop_host(&sequence->kv);
  kv_.release(&sequence->kv);
  sequence->state = State::kFinished;
  --request->live;
  if (request->live == 0) --num_live_;
  if (!request->forked && request->leader == sequence->rank.index && was != State::kHeld) lead(request);
  drop_if_done(request);
}

void Scheduler::drop_if_done(Request* request) {
  if (request->live == 0 && request->in_flight == 0) requests_.erase(request->options.key);
}

bool Scheduler::abort(int64_t key) {
  const auto found = requests_.find(key);
  if (found == requests_.end() || found->second->live == 0) return false;
  Request* request = found->second.get();
  // The held ones first, so that none of them is made leader.
  for (const bool held : {true, false}) {
    for (size_t i = 0, n = request->sequences.size(); i < n; ++i) {
      Sequence& sequence = request->sequences[i];
      if (sequence.state == State::kFinished || (held && sequence.state != State::kHeld)) continue;
      const bool last = request->live == 1;
      end(&sequence);
      if (last) return true;  // the request may be gone
    }
  }
  return true;
}

void Scheduler::finish(int64_t key, int64_t index) {
  Sequence* sequence = find(key, index);
  if (sequence != nullptr) end(sequence);
}

void Scheduler::set_step_times(std::vector<float> times) { planner_.set_step_times(std::move(times)); }

void Scheduler::reset_prefix_cache() {
  for (auto& [key, request] : requests_) {
    for (Sequence& sequence : request->sequences) kv_.forget(&sequence.kv);
  }
  kv_.reset();
}

int64_t Scheduler::num_waiting() const { return static_cast<int64_t>(waiting_.size()) - num_preempted_ + num_held_; }

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = stats_;
  for (size_t g = 0; g < kv_.num_groups(); ++g) {
    const BlockPool& pool = kv_.pool(g);
    const int64_t host = config_.groups[g].host_blocks;
    stats.groups.push_back(
        {pool.size(), pool.num_used(), pool.num_cached(), pool.num_empty(), host, host - kv_.host_free(g)});
  }
  stats.evictions = kv_.evictions();
  stats.nodes = kv_.tree().num_nodes();
  return stats;
}

void Scheduler::check() const {
  const auto fail = [](const std::string& what) { throw std::logic_error("quartz: Scheduler.check: " + what); };
  std::vector<const SequenceKv*> tables;
  size_t running = 0, waiting = 0;
  int64_t unfinished = 0, held = 0, preempted = 0, due = 0;
  for (const auto& [key, request] : requests_) {
    int64_t live = 0, in_flight = 0;
    unfinished += request->live > 0 ? 1 : 0;
    for (const Sequence& sequence : request->sequences) {
      tables.push_back(&sequence.kv);
      live += sequence.state != State::kFinished ? 1 : 0;
      in_flight += sequence.in_flight;
      held += sequence.state == State::kHeld ? 1 : 0;
      waiting += sequence.state == State::kWaiting ? 1 : 0;
      running += sequence.state == State::kRunning ? 1 : 0;
      preempted += sequence.state == State::kWaiting && sequence.preempted ? 1 : 0;
      due += sequence.state == State::kRunning && sequence.decoding && !request->forked ? 1 : 0;
      if ((sequence.slot >= 0) != (sequence.state == State::kRunning)) fail("a slot without a running sequence");
      if (sequence.in_flight == 0 && sequence.flight_most != 0) {
        fail("tokens are expected of a sequence that has no rows in flight");
      }
    }
    if (live != request->live) fail("a request counts its sequences wrongly");
    if (in_flight != request->in_flight) fail("a request counts its rows in flight wrongly");
    if (live == 0 && in_flight == 0) fail("a request is kept for nothing");
  }
  if (running != running_.size() || waiting != waiting_.size()) fail("a sequence is in no list, or in a wrong one");
  if (unfinished != num_live_ || held != num_held_ || preempted != num_preempted_ || due != forks_due_)
    fail("a count of requests or sequences is wrong");
  if (!std::is_sorted(running_.begin(), running_.end(), ByRank())) fail("running sequences are out of order");
  const auto slots = static_cast<size_t>(std::min(config_.max_num_seqs, config_.max_num_batched_tokens));
  std::vector<char> used(slots, 0);
  for (const int32_t slot : free_slots_) ++used[static_cast<size_t>(slot)];
  for (const Sequence* sequence : running_) ++used[static_cast<size_t>(sequence->slot)];
  if (std::any_of(used.begin(), used.end(), [](char count) { return count != 1; }))
    fail("a slot is lost or taken twice");
  std::vector<StepPlan::Checkpoint> checkpoints;
  for (const auto& plan : launched_) {
    checkpoints.insert(checkpoints.end(), plan->checkpoints.begin(), plan->checkpoints.end());
  }
  kv_.check(tables, checkpoints);
}

}  // namespace quartz::engine
