// A request and its sequences: what is asked for, the tokens known to the host, and the blocks that hold their keys.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace quartz::engine {

// The blocks of a sequence in one group by column, that is position / block size. Columns before `first` were given
// back (a sliding window has passed them) and are -1.
struct GroupTable {
  std::vector<int32_t> blocks;
  int64_t first = 0;
};

struct SequenceKv {
  std::vector<GroupTable> groups;
  std::vector<std::vector<int32_t>> host;  // swapped out: a block of host memory a column, -1 none
  bool swapped = false;
  int32_t node = -1;       // of the prefix tree, pinned: the last block that is registered; -1: nothing is registered
  int64_t registered = 0;  // blocks up to `node`
};

enum class State : uint8_t {
  kHeld,      // waits until its request is forked
  kWaiting,   // in the queue: new, or preempted
  kRunning,   // has a slot
  kFinished,  // may still have rows in flight
};

// StepOutput.finished
enum class Finish : int8_t { kNone = 0, kStop = 1, kLength = 2, kAborted = 3, kError = 4 };

// Who comes first: smaller is better. Priorities are 0 under FCFS.
struct Rank {
  int64_t priority = 0, arrival = 0;
  int32_t index = 0;
  bool operator<(const Rank& other) const {
    return std::tie(priority, arrival, index) < std::tie(other.priority, other.arrival, other.index);
  }
};

struct Request;

struct Sequence {
  Request* request = nullptr;
  Rank rank;
  State state = State::kHeld;
  int32_t slot = -1;
  std::vector<int32_t> tokens;  // prompt and committed output
  SequenceKv kv;

  int64_t launched = 0;    // tokens whose keys are in the cache once all launched prefill rows have run
  int64_t computed = 0;    // tokens whose keys are known to be in the cache
  int64_t target = 0;      // prefill goes this far
  bool decoding = false;   // prefill has been launched to the end
  bool preempted = false;  // waits to come back
  bool admitted = false;   // has had a slot

  // Launched steps whose tokens are not known: how many, and what they can add to the length at most. (At least
  // nothing: a step may be unable to draw a token.)
  int32_t in_flight = 0;
  int64_t flight_most = 0;
  uint32_t residency = 0;   // counts how often it lost its blocks: rows launched before say nothing about the new ones
  int64_t last_step = -1;   // scheduled last in this step
  int64_t logits_done = 0;  // prompt rows before it have given their logits

  // In the queue, for a prefix that another sequence is computing: until it has `keys` of them.
  struct Wait {
    int64_t key = -1;  // -1: for nothing
    int32_t index = 0;
    uint32_t residency = 0;
    int64_t keys = 0;
  } wait;
  int32_t waits = 0;         // how often it did
  int64_t branch = 0;        // a recurrent state is kept here: other prompts leave this one after so many tokens,
  int32_t branch_node = -1;  // which are this node's

  int32_t available = -1;          // drafts proposed for the next step, -1 unknown
  float acceptance = 0.0f;         // moving average: a draft is accepted if those before it are
  std::vector<float> confidences;  // of the drafter, empty without

  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  int64_t most_length() const { return length() + flight_most; }
};

struct RequestOptions {
  int64_t key = 0;
  int64_t max_tokens = 0, min_tokens = 0;
  int64_t n = 1, priority = 0;
  int64_t drafts = -1;       // at most, a step; -1: the scheduler's max_drafts
  int64_t logits_from = -1;  // prompt rows from here on give logits; -1: none
  bool cache_read = true;
  std::string name_space = {};
  std::vector<int32_t> stop_ids = {};
};

struct Request {
  RequestOptions options;
  int64_t prompt_length = 0;
  int64_t limit = 0;  // tokens of a sequence at most
  bool forked = true;
  int32_t leader = 0;     // until the fork: the sequence that computes the prompt
  int64_t live = 0;       // sequences that are not finished
  int64_t in_flight = 0;  // rows of its sequences
  std::vector<Sequence> sequences;
};

}  // namespace quartz::engine
