#include "engine/kv_cache.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace quartz::engine {
namespace {

int64_t max_nodes(const SchedulerConfig& config) {
  // A node without a block lives only as the parent of one with a block. The factor leaves room for such chains in
  // models that have sliding windows alone, and bounds them.
  int64_t blocks = 4096;
  for (const GroupSpec& group : config.groups) blocks += 4 * group.num_blocks;
  return std::min<int64_t>(blocks, std::numeric_limits<int32_t>::max() / 2);
}

// The first column that a query at `position` sees.
int64_t first_column(int64_t position, int64_t window, int64_t block_size) {
  return std::max<int64_t>(0, position - window + 1) / block_size;
}

}  // namespace

KvCache::KvCache(const SchedulerConfig& config)
    : config_(config),
      tree_(config.block_size, static_cast<int64_t>(config.groups.size()), max_nodes(config)),
      run_(config.groups.size(), 0),
      restore_(config.groups.size(), -1) {
  for (const GroupSpec& group : config_.groups) {
    pools_.emplace_back(group.num_blocks);
    auto& host = host_free_.emplace_back();
    for (int64_t block = group.host_blocks; block-- > 0;) host.push_back(static_cast<int32_t>(block));
    has_full_ = has_full_ || group.kind == GroupKind::kFull;
    has_states_ = has_states_ || group.kind == GroupKind::kState;
  }
}

int32_t KvCache::take(size_t g) {
  int32_t evicted;
  const int32_t block = pools_[g].allocate(&evicted);
  if (evicted >= 0) {
    tree_.detach(evicted, static_cast<int64_t>(g));
    ++evictions_;
  }
  if (block < 0) throw std::logic_error("quartz: KvCache: a block was promised and none is free");
  return block;
}

void KvCache::put(size_t g, int32_t block) {
  pools_[g].release(block);
  ++version_;
}

void KvCache::open(SequenceKv* kv, std::string_view name_space) {
  kv->groups.resize(pools_.size());
  for (GroupTable& table : kv->groups) {
    table.blocks.clear();
    table.first = 0;
  }
  kv->registered = 0;
  kv->node = config_.enable_prefix_caching ? tree_.root(name_space) : -1;
  if (kv->node >= 0) tree_.pin(kv->node);
  std::fill(restore_.begin(), restore_.end(), -1);
}

int64_t KvCache::match(SequenceKv* kv, const std::vector<int32_t>& tokens, int64_t most) {
  known_ = {kv->node, 0};
  if (kv->node < 0) return 0;
  const int64_t size = config_.block_size;
  path_.clear();
  std::fill(run_.begin(), run_.end(), 0);
  int64_t best = 0;
  int32_t node = kv->node;
  for (int64_t i = 0; i < most / size; ++i) {
    node = tree_.find(node, tokens.data() + i * size);
    if (node < 0) break;
    bool whole = true, usable = true;
    for (size_t g = 0; g < pools_.size(); ++g) {
      const bool has = tree_.block(node, static_cast<int64_t>(g)) >= 0;
      switch (config_.groups[g].kind) {
        case GroupKind::kFull:
          whole = whole && has;
          break;
        case GroupKind::kSliding:
          run_[g] = has ? run_[g] + 1 : 0;
          usable = usable && run_[g] >= i + 1 - first_column((i + 1) * size, config_.groups[g].window, size);
          break;
        case GroupKind::kState:
          usable = usable && has;
          break;
      }
    }
    if (!whole) break;
    path_.push_back(node);
    known_ = {node, i + 1};
    if (usable) best = i + 1;
  }
  if (best == 0) return 0;
  for (size_t g = 0; g < pools_.size(); ++g) {
    GroupTable& table = kv->groups[g];
    const int64_t group = static_cast<int64_t>(g);
    if (config_.groups[g].kind == GroupKind::kState) {
      restore_[g] = tree_.block(path_[static_cast<size_t>(best) - 1], group);
      pools_[g].acquire(restore_[g]);
      held_.emplace_back(g, restore_[g]);
      continue;
    }
    if (config_.groups[g].kind == GroupKind::kSliding) {
      table.first = first_column(best * size, config_.groups[g].window, size);
    }
    table.blocks.assign(static_cast<size_t>(best), -1);
    for (int64_t i = table.first; i < best; ++i) {
      const int32_t block = tree_.block(path_[static_cast<size_t>(i)], group);
      pools_[g].acquire(block);
      table.blocks[static_cast<size_t>(i)] = block;
    }
  }
  tree_.pin(path_[static_cast<size_t>(best) - 1]);
  tree_.unpin(kv->node);
  kv->node = path_[static_cast<size_t>(best) - 1];
  kv->registered = best;
  return best * size;
}

void KvCache::release(SequenceKv* kv) {
  for (size_t g = 0; g < kv->groups.size(); ++g) {
    GroupTable& table = kv->groups[g];
    for (size_t i = table.blocks.size(); i-- > 0;) {
      if (table.blocks[i] >= 0) put(g, table.blocks[i]);
    }
    table.blocks.clear();
    table.first = 0;
  }
  forget(kv);
  std::fill(restore_.begin(), restore_.end(), -1);
}

void KvCache::forget(SequenceKv* kv) {
  if (kv->node >= 0) tree_.unpin(kv->node);
  kv->node = -1;
  kv->registered = 0;
}

int64_t KvCache::missing(const SequenceKv& kv, size_t g, int64_t end) const {
  const GroupTable& table = kv.groups[g];
  const auto have = static_cast<int64_t>(table.blocks.size());
  if (config_.groups[g].kind == GroupKind::kState) return 1 - have;
  int64_t wanted = std::max<int64_t>(0, columns(end) - have);
  if (config_.groups[g].kind == GroupKind::kSliding) {
    // Its window and a little more: chunks are cut to what there is.
    const int64_t held = std::max<int64_t>(0, have - table.first);
    wanted = std::min(wanted, std::max<int64_t>(0, columns(config_.groups[g].window) + 3 - held));
  }
  return wanted;
}

int64_t KvCache::room(const SequenceKv& kv, int64_t spare) const {
  int64_t tokens = std::numeric_limits<int32_t>::max();
  for (size_t g = 0; g < pools_.size(); ++g) {
    const auto have = static_cast<int64_t>(kv.groups[g].blocks.size());
    if (config_.groups[g].kind == GroupKind::kState) {
      if (have == 0 && pools_[g].num_available() == 0) return 0;
    } else {
      const int64_t kept = config_.groups[g].kind == GroupKind::kSliding ? spare : 0;
      const int64_t more = std::max<int64_t>(0, pools_[g].num_available() - kept);
      tokens = std::min(tokens, (have + more) * config_.block_size);
    }
  }
  return tokens;
}

void KvCache::grow(SequenceKv* kv, int64_t end, int32_t slot, StepPlan* plan) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    GroupTable& table = kv->groups[g];
    const int64_t wanted = config_.groups[g].kind == GroupKind::kState ? 1 : columns(end);
    for (auto column = static_cast<int64_t>(table.blocks.size()); column < wanted; ++column) {
      const int32_t block = take(g);
      table.blocks.push_back(block);
      plan->table_updates.push_back({static_cast<int32_t>(g), slot, static_cast<int32_t>(column), block});
    }
  }
}

void KvCache::slide(SequenceKv* kv, int64_t start) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (config_.groups[g].kind != GroupKind::kSliding) continue;
    GroupTable& table = kv->groups[g];
    const int64_t first = std::min(first_column(start, config_.groups[g].window, config_.block_size),
                                   static_cast<int64_t>(table.blocks.size()));
    for (; table.first < first; ++table.first) {
      int32_t& block = table.blocks[static_cast<size_t>(table.first)];
      if (block >= 0) put(g, block);
      block = -1;
    }
  }
}

void KvCache::upload(const SequenceKv& kv, int32_t slot, StepPlan* plan) const {
  for (size_t g = 0; g < kv.groups.size(); ++g) {
    const GroupTable& table = kv.groups[g];
    for (auto i = table.first; i < static_cast<int64_t>(table.blocks.size()); ++i) {
      plan->table_updates.push_back(
          {static_cast<int32_t>(g), slot, static_cast<int32_t>(i), table.blocks[static_cast<size_t>(i)]});
    }
  }
}

void KvCache::commit(SequenceKv* kv, const std::vector<int32_t>& tokens, int64_t computed) {
  if (kv->node < 0) return;
  for (const int64_t full = computed / config_.block_size; kv->registered < full; ++kv->registered) {
    const int32_t node = tree_.add(kv->node, tokens.data() + kv->registered * config_.block_size);
    if (node < 0) return;  // no node is free: later
    tree_.pin(node);
    tree_.unpin(kv->node);
    kv->node = node;
    for (size_t g = 0; g < pools_.size(); ++g) {
      if (config_.groups[g].kind == GroupKind::kState) continue;
      const int32_t block = kv->groups[g].blocks[static_cast<size_t>(kv->registered)];
      if (block < 0 || pools_[g].node(block) >= 0 || tree_.block(node, static_cast<int64_t>(g)) >= 0) continue;
      tree_.attach(node, static_cast<int64_t>(g), block);
      pools_[g].set_node(block, node);
      ++version_;
    }
  }
}

void KvCache::start_state(SequenceKv* kv, StepPlan* plan) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    if (config_.groups[g].kind != GroupKind::kState) continue;
    const int32_t block = kv->groups[g].blocks[0], from = restore_[g];
    plan->state_ops.push_back({from >= 0 ? kCopyState : kZeroState, static_cast<int32_t>(g), from, block});
    restore_[g] = -1;
  }
}

int32_t KvCache::checkpoint(const SequenceKv& kv, size_t g, int64_t boundary, StepPlan* plan) {
  if (config_.groups[g].kind != GroupKind::kState || kv.node < 0 || pools_[g].num_available() == 0) return -1;
  const bool known = kv.registered * config_.block_size == boundary;
  if (known && tree_.block(kv.node, static_cast<int64_t>(g)) >= 0) return -1;
  const int32_t block = take(g);
  plan->state_ops.push_back({kCopyState, static_cast<int32_t>(g), kv.groups[g].blocks[0], block});
  return block;
}

void KvCache::end_checkpoint(SequenceKv* kv, size_t g, int32_t block, bool keep) {
  if (keep && kv->node >= 0 && tree_.block(kv->node, static_cast<int64_t>(g)) < 0) {
    tree_.attach(kv->node, static_cast<int64_t>(g), block);
    pools_[g].set_node(block, kv->node);
  }
  put(g, block);
}

void KvCache::drop_held() {
  for (const auto& [g, block] : held_) put(g, block);
  held_.clear();
}

bool KvCache::can_fork() const {
  // A block of each group: for the copy of the last block, which has a place left for the next token, or the next one.
  return std::all_of(pools_.begin(), pools_.end(), [](const BlockPool& pool) { return pool.num_available() > 0; });
}

void KvCache::fork(const SequenceKv& parent, SequenceKv* child, int64_t computed, StepPlan* plan) {
  if (parent.node >= 0) tree_.pin(parent.node);
  forget(child);
  child->node = parent.node;
  child->registered = parent.registered;
  const int64_t shared = computed / config_.block_size;
  for (size_t g = 0; g < pools_.size(); ++g) {
    const GroupTable& from = parent.groups[g];
    GroupTable& to = child->groups[g];
    const auto group = static_cast<int32_t>(g);
    if (config_.groups[g].kind == GroupKind::kState) {
      to.blocks.assign(1, take(g));
      plan->state_ops.push_back({kCopyState, group, from.blocks[0], to.blocks[0]});
      continue;
    }
    to.first = std::min(from.first, columns(computed));
    to.blocks.assign(from.blocks.begin(), from.blocks.begin() + columns(computed));
    for (int64_t i = to.first; i < shared; ++i) pools_[g].acquire(to.blocks[static_cast<size_t>(i)]);
    if (columns(computed) > shared) {
      to.blocks.back() = take(g);
      plan->copies.push_back({group, from.blocks[static_cast<size_t>(shared)], to.blocks.back()});
    }
  }
}

bool KvCache::swap_out(SequenceKv* kv, int64_t most, StepPlan* plan) {
  const auto swapped = [&](size_t g) {  // columns [first, second)
    const GroupTable& table = kv->groups[g];
    const auto have = static_cast<int64_t>(table.blocks.size());
    const int64_t end = config_.groups[g].kind == GroupKind::kState ? have : std::min(have, columns(most));
    return std::pair{std::min(table.first, end), end};
  };
  for (size_t g = 0; g < pools_.size(); ++g) {
    const auto [first, end] = swapped(g);
    if (end - first > host_free(g)) return false;
  }
  kv->host.resize(pools_.size());
  for (size_t g = 0; g < pools_.size(); ++g) {
    const auto [first, end] = swapped(g);
    GroupTable& table = kv->groups[g];
    kv->host[g].assign(static_cast<size_t>(end), -1);
    for (auto i = static_cast<size_t>(first); i < static_cast<size_t>(end); ++i) {
      const int32_t host = host_free_[g].back();
      host_free_[g].pop_back();
      kv->host[g][i] = host;
      plan->swap_out.push_back({static_cast<int32_t>(g), table.blocks[i], host});
    }
    for (size_t i = table.blocks.size(); i-- > 0;) {
      if (table.blocks[i] >= 0) put(g, table.blocks[i]);
    }
    table.blocks.clear();
  }
  kv->swapped = true;
  return true;
}

bool KvCache::can_swap_in(const SequenceKv& kv, int64_t computed) const {
  for (size_t g = 0; g < pools_.size(); ++g) {
    const bool state = config_.groups[g].kind == GroupKind::kState;
    const int64_t wanted = state ? 1 : columns(computed) - first_wanted(kv, g, computed);
    if (wanted > pools_[g].num_available()) return false;
  }
  return true;
}

// What a sliding window has passed since the sequence was swapped out stays behind.
int64_t KvCache::first_wanted(const SequenceKv& kv, size_t g, int64_t computed) const {
  if (config_.groups[g].kind != GroupKind::kSliding) return 0;
  return std::max(kv.groups[g].first, first_column(computed, config_.groups[g].window, config_.block_size));
}

void KvCache::swap_in(SequenceKv* kv, int64_t computed, StepPlan* plan) {
  for (size_t g = 0; g < pools_.size(); ++g) {
    GroupTable& table = kv->groups[g];
    const bool state = config_.groups[g].kind == GroupKind::kState;
    const auto end = state ? kv->host[g].size() : static_cast<size_t>(columns(computed));
    table.blocks.assign(end, -1);
    table.first = first_wanted(*kv, g, computed);
    for (auto i = static_cast<size_t>(table.first); i < end; ++i) {
      table.blocks[i] = take(g);
      plan->swap_in.push_back({static_cast<int32_t>(g), table.blocks[i], kv->host[g][i]});
    }
  }
  drop_host(kv);
}

void KvCache::drop_host(SequenceKv* kv) {
  for (size_t g = 0; g < kv->host.size(); ++g) {
    for (size_t i = kv->host[g].size(); i-- > 0;) {
      if (kv->host[g][i] >= 0) host_free_[g].push_back(kv->host[g][i]);
    }
    kv->host[g].clear();
  }
  kv->swapped = false;
}

void KvCache::drop_stale(StepPlan* plan) const {
  std::erase_if(plan->swap_out, [&](const auto& row) {
    const auto& free = host_free_[static_cast<size_t>(row[0])];
    return std::find(free.begin(), free.end(), row[2]) != free.end();
  });
}

void KvCache::reset() {
  for (const int32_t node : tree_.nodes()) {
    for (size_t g = 0; g < pools_.size(); ++g) {
      const int32_t block = tree_.block(node, static_cast<int64_t>(g));
      if (block < 0) continue;
      pools_[g].set_node(block, -1);
      tree_.detach(node, static_cast<int64_t>(g));
    }
  }
  ++version_;
}

void KvCache::check(const std::vector<const SequenceKv*>& sequences,
                    const std::vector<StepPlan::Checkpoint>& checkpoints) const {
  if (!held_.empty()) throw std::logic_error("quartz: KvCache.check: blocks are held outside schedule()");
  for (size_t g = 0; g < pools_.size(); ++g) {
    std::vector<int32_t> references(static_cast<size_t>(pools_[g].size()), 0);
    std::vector<char> host(static_cast<size_t>(config_.groups[g].host_blocks), 0);
    for (const SequenceKv* kv : sequences) {
      if (g < kv->groups.size()) {
        for (const int32_t block : kv->groups[g].blocks) {
          if (block >= 0) ++references[static_cast<size_t>(block)];
        }
      }
      if (g < kv->host.size()) {
        for (const int32_t block : kv->host[g]) {
          if (block >= 0) ++host[static_cast<size_t>(block)];
        }
      }
    }
    for (const auto& checkpoint : checkpoints) {
      if (checkpoint.group == static_cast<int32_t>(g)) ++references[static_cast<size_t>(checkpoint.block)];
    }
    pools_[g].check(references);
    for (const int32_t block : host_free_[g]) ++host[static_cast<size_t>(block)];
    if (std::any_of(host.begin(), host.end(), [](char count) { return count != 1; })) {
      throw std::logic_error("quartz: KvCache.check: a block of host memory is lost or used twice");
    }
    for (int32_t block = 0; block < pools_[g].size(); ++block) {
      const int32_t node = pools_[g].node(block);
      if (node >= 0 && tree_.block(node, static_cast<int64_t>(g)) != block) {
        throw std::logic_error("quartz: KvCache.check: block " + std::to_string(block) + " and its node disagree");
      }
    }
  }
  tree_.check();
}

}  // namespace quartz::engine
