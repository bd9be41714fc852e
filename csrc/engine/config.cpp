#include "engine/config.h"

#include <algorithm>
#include <limits>

namespace quartz::engine {

void refuse(const char* call, const std::string& field, const std::string& rule, const std::string& got) {
  throw std::invalid_argument("quartz: Scheduler." + std::string(call) + ": " + field + ": " + rule + ", got " + got);
}

void refuse(const char* call, const std::string& field, const std::string& rule, int64_t got) {
  refuse(call, field, rule, std::to_string(got));
}

void validate(const SchedulerConfig& config) {
  // Block ids, slots and lengths are int32 in the plan.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() / 2;
  const auto in_range = [](const std::string& field, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most) {
      refuse("__init__", field, "must be from " + std::to_string(least) + " to " + std::to_string(most), value);
    }
  };
  in_range("block_size", config.block_size, 1, 65536);
  in_range("max_num_seqs", config.max_num_seqs, 1, 1 << 20);
  in_range("max_num_batched_tokens", config.max_num_batched_tokens, 1, kMost);
  in_range("max_model_len", config.max_model_len, 2, kMost);
  in_range("max_drafts", config.max_drafts, 0, 64);
  in_range("max_prefill_tokens_per_request", config.max_prefill_tokens_per_request, 0, kMost);
  if (config.groups.empty()) refuse("__init__", "groups", "must have at least one group of layers", int64_t{0});
  for (size_t g = 0; g < config.groups.size(); ++g) {
    const GroupSpec& group = config.groups[g];
    const std::string name = "groups[" + std::to_string(g) + "]";
    in_range(name + ".num_blocks", group.num_blocks, 1, kMost);
    in_range(name + ".host_blocks", group.host_blocks, 0, kMost);
    if (group.kind != GroupKind::kSliding) {
      if (group.window != 0) refuse("__init__", name + ".window", "is for sliding groups only", group.window);
      continue;
    }
    in_range(name + ".window", group.window, 1, kMost);
    // The keys of one query, wherever the window lies relative to the blocks: with fewer nothing could ever run.
    const int64_t least = ceil_div(group.window - 1, config.block_size) + 1;
    if (group.num_blocks < least) {
      refuse("__init__", name + ".num_blocks",
             "a window of " + std::to_string(group.window) + " needs at least " + std::to_string(least) +
                 " blocks of " + std::to_string(config.block_size),
             group.num_blocks);
    }
  }
}

int64_t capacity_tokens(const SchedulerConfig& config) {
  int64_t tokens = std::numeric_limits<int32_t>::max();
  for (const GroupSpec& group : config.groups) {
    if (group.kind == GroupKind::kFull) tokens = std::min(tokens, group.num_blocks * config.block_size);
  }
  return tokens;
}

}  // namespace quartz::engine
