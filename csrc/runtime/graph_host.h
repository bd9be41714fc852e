// Graphs of the host substrate: the operator calls of one thread are recorded once, then replayed from C++.
//
// What differs from a CUDA graph is how the calls are recorded, not what a user sees: a capture leaves memory and
// generators as they were, a replay runs the recorded calls on the recorded tensors, and what a CUDA graph cannot hold
// (a value read on the host) ends the capture with an error. docs/graphs.md states the rules.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "runtime/export.h"

namespace quartz {

class Capture;
class Program;

// Names the memory pool that graphs say they share, as c10's MempoolId_t. Intermediate results take memory from the
// allocator and give it back in each replay, so on host there is nothing that a pool would have to keep.
using GraphPool = std::pair<unsigned long long, unsigned long long>;
QUARTZ_API GraphPool new_graph_pool();

// How much a capture forbids (torch.cuda.graph's capture_error_mode). A capture sees its own thread alone, so "global"
// and "thread_local" are the same here; "relaxed" lets the thread wait for an event.
enum class CaptureMode { kStrict, kRelaxed };

class QUARTZ_API HostGraph {
 public:
  explicit HostGraph(bool keep_graph);
  HostGraph(const HostGraph&) = delete;
  HostGraph& operator=(const HostGraph&) = delete;
  ~HostGraph();

  // {0, 0}: a pool of its own.
  void capture_begin(GraphPool pool, CaptureMode mode);
  void capture_end();
  // Ends a capture whose code has failed, if this graph's is still under way: nothing is kept of it.
  void capture_abort();
  void instantiate();
  void replay();
  void reset();
  GraphPool pool() const { return pool_; }
  void debug_dump(const std::string& path) const;

 private:
  const Program& captured(const char* action) const;

  const bool keep_graph_;
  bool instantiated_ = false, replayed_ = false;
  GraphPool pool_{0, 0};
  std::shared_ptr<Capture> capture_;  // while it is under way
  std::unique_ptr<Program> program_;
  std::mutex replaying_;
};

// Whether this thread records a graph and is not inside a recorded call.
QUARTZ_API bool capturing_on_host();

// Raises, and ends the capture, if this thread records a graph: for what a graph cannot hold and no operator call
// shows. `what` is the subject of the sentence, `instead` what to do.
QUARTZ_API void refuse_in_capture(const char* what, const char* instead);
void refuse_waiting_for_event_in_capture();

// Registers what sees the calls of a capturing thread.
void register_host_graphs();

}  // namespace quartz
