// What a scheduler is made for: sizes, groups of layers, policies. Checked once, by `validate`.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

// What the Python binding calls; the engine includes nothing of runtime, where the like of it stands.
#define QUARTZ_ENGINE_API __attribute__((visibility("default")))

namespace quartz::engine {

// Layers that share a block table. kFull keeps the keys of all tokens, kSliding those of the last `window` (a query at
// p sees p - window + 1 .. p), kState one block a sequence: a recurrent state, rewritten by every token.
enum class GroupKind : uint8_t { kFull, kSliding, kState };

struct GroupSpec {
  GroupKind kind = GroupKind::kFull;
  int64_t window = 0;       // tokens, kSliding only
  int64_t num_blocks = 0;   // on the device
  int64_t host_blocks = 0;  // in host memory, for preemption by swap
};

enum class Policy : uint8_t { kFcfs, kPriority };
enum class Preemption : uint8_t { kRecompute, kSwap };

struct SchedulerConfig {
  int64_t block_size = 16;                // tokens
  int64_t max_num_seqs = 256;             // slots
  int64_t max_num_batched_tokens = 8192;  // rows of a step
  int64_t max_model_len = 0;              // tokens of a sequence, prompt and output
  std::vector<GroupSpec> groups;
  bool enable_prefix_caching = true;
  Policy policy = Policy::kFcfs;
  Preemption preemption = Preemption::kRecompute;
  int64_t max_drafts = 0;  // a sequence and step
  bool adaptive_drafts = false;
  int64_t max_prefill_tokens_per_request = 0;  // a step; 0: no limit
};

// "quartz: Scheduler.<call>: <field>: <rule>, got <value>", which Python sees as ValueError.
[[noreturn]] QUARTZ_ENGINE_API void refuse(const char* call, const std::string& field, const std::string& rule,
                                           const std::string& got);
[[noreturn]] QUARTZ_ENGINE_API void refuse(const char* call, const std::string& field, const std::string& rule,
                                           int64_t got);

void validate(const SchedulerConfig& config);

// Tokens whose keys fit into the blocks of an otherwise empty device.
int64_t capacity_tokens(const SchedulerConfig& config);

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace quartz::engine
