#include "runtime/graph_host.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <fstream>

#include "runtime/graph_capture.h"
#include "runtime/graph_program.h"
#include "runtime/substrate.h"

namespace quartz {

GraphPool new_graph_pool() {
  static std::atomic<unsigned long long> next{1};
  return {0, next.fetch_add(1)};
}

HostGraph::HostGraph(bool keep_graph) : keep_graph_(keep_graph) {}

HostGraph::~HostGraph() {
  try {
    capture_abort();
  } catch (const std::exception& error) {
    TORCH_WARN("quartz: the capture of a graph that was dropped could not be undone: ", error.what());
  }
}

const Program& HostGraph::captured(const char* action) const {
  TORCH_CHECK(capture_ == nullptr, "quartz: Graph.", action, ": the capture has not ended");
  TORCH_CHECK(program_ != nullptr, "quartz: Graph.", action, ": nothing was captured");
  return *program_;
}

void HostGraph::capture_begin(GraphPool pool, CaptureMode mode) {
  TORCH_CHECK(program_ == nullptr && capture_ == nullptr,
              "quartz: Graph.capture_begin: this graph has been captured already; reset() it or make another one");
  const auto other = Capture::current();  // also where a recorded call has brought us here
  TORCH_CHECK(other == nullptr || !other->under_way(),
              "quartz: Graph.capture_begin: this thread captures another graph");
  const auto& guard = substrate().guard();
  TORCH_CHECK(guard.getStream(guard.getDevice()) != guard.getDefaultStream(guard.getDevice()),
              "quartz: Graph.capture_begin: a graph is captured on a stream other than the default one; use ",
              "torch.quartz.graph(), or with torch.quartz.stream(torch.quartz.Stream())");
  pool_ = pool == GraphPool{0, 0} ? new_graph_pool() : pool;
  const auto capture = std::make_shared<Capture>(mode);
  capture->begin();
  capture_ = capture;
}

void HostGraph::capture_end() {
  TORCH_CHECK(capture_ != nullptr, "quartz: Graph.capture_end: no capture is under way");
  const auto capture = capture_;
  if (!capture->under_way()) capture_ = nullptr;  // an error has ended it: this says so, and the graph is free again
  program_ = capture->end();
  capture_ = nullptr;
  instantiated_ = !keep_graph_;
}

void HostGraph::capture_abort() {
  if (capture_ == nullptr) return;
  capture_->abort("the code that was captured has failed");
  capture_ = nullptr;
}

void HostGraph::instantiate() {
  captured("instantiate");
  TORCH_CHECK(keep_graph_, "quartz: Graph.instantiate: the graph is instantiated already: that is for keep_graph=True");
  const std::unique_lock lock(replaying_, std::try_to_lock);
  TORCH_CHECK(lock.owns_lock(), "quartz: Graph.instantiate: the graph is being replayed");
  program_->plan();
  instantiated_ = true;
}

void HostGraph::replay() {
  captured("replay");
  TORCH_CHECK(!capturing_on_host(), "quartz: Graph.replay: this thread captures a graph, and a graph holds no other");
  const std::unique_lock lock(replaying_, std::try_to_lock);
  TORCH_CHECK(lock.owns_lock(),
              "quartz: Graph.replay: another thread replays this graph, which has one set of tensors; replay it in ",
              "turn, or capture one for each thread");
  if (!instantiated_ || !replayed_) program_->plan();  // what was dropped since the capture is intermediate, too
  instantiated_ = replayed_ = true;
  program_->replay();
}

void HostGraph::reset() {
  const std::unique_lock lock(replaying_, std::try_to_lock);
  TORCH_CHECK(lock.owns_lock(), "quartz: Graph.reset: the graph is being replayed");
  capture_abort();
  program_ = nullptr;
  instantiated_ = replayed_ = false;
}

void HostGraph::debug_dump(const std::string& path) const {
  const auto& program = captured("debug_dump");
  std::ofstream file(path);
  program.dump(file);
  file.close();
  TORCH_CHECK(file.good(), "quartz: Graph.debug_dump: cannot write ", path);
}

}  // namespace quartz
