// The capture of a host graph: sees every operator call of its thread, runs it, and keeps what a replay must repeat.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "runtime/graph_host.h"
#include "runtime/graph_program.h"

namespace quartz {

class Capture : public std::enable_shared_from_this<Capture> {
 public:
  explicit Capture(CaptureMode mode);

  // The capture of the calling thread, or null.
  static std::shared_ptr<Capture> current();

  void begin();
  // What was recorded; memory and generators are again as they were. RuntimeError if the capture has failed.
  std::unique_ptr<Program> end();
  // Nothing is kept. `reason` is what end() says.
  void abort(const std::string& reason);
  // Aborts and raises: "quartz: graph capture: <what> <why>".
  [[noreturn]] void refuse(const std::string& what, const std::string& why);

  CaptureMode mode() const { return mode_; }
  bool under_way() const { return program_ != nullptr; }

  // One operator call at the top.
  void call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  // What is to be done with calls of an operator.
  struct Facts {
    std::string name;
    std::size_t arguments, returns;
    std::vector<bool> written;      // arguments, by the schema
    std::vector<bool> restored;     // arguments that are as before after the capture
    std::vector<bool> is_argument;  // returns that are arguments or views of them
    bool composite;                 // made of other operators, which are recorded instead
    bool metadata;                  // changes or makes tensors over the same memory alone: nothing to repeat
    bool uninitialised;             // torch.empty
    bool reads_values, shape_by_values, masks_by_index, copy, custom;
    bool below_autograd;
  };
  // Memory of the caller's that a recorded call has written during the capture, as it was before.
  struct Saved {
    c10::Storage storage;
    std::size_t offset;
    std::vector<char> bytes;
  };
  struct SavedGenerator {
    at::Generator generator;
    at::Tensor state;
  };

  const Facts& facts_of(const c10::OperatorHandle& op);
  void check_values_stay(const Facts& facts, const torch::jit::Stack& stack, std::size_t base);
  void check_copy(const torch::jit::Stack& stack, std::size_t base);
  void check_results(const Facts& facts, const torch::jit::Stack& stack, bool device_arguments);
  void record(const c10::OperatorHandle& op, const Facts& facts, c10::DispatchKeySet keys, torch::jit::Stack* stack,
              bool device_arguments);
  void add_results(const Facts& facts, const torch::jit::Stack& stack, Program::Call& call);
  void save(const at::Tensor& tensor, std::vector<Saved>& before);
  void keep_changed(std::vector<Saved>& before);
  void save_generator(const at::Generator& generator);
  void restore();

  const CaptureMode mode_;
  const std::thread::id thread_;
  std::unique_ptr<Program> program_;
  std::string failure_;
  std::unordered_map<const void*, Facts> facts_;
  std::vector<Saved> saved_;
  std::vector<SavedGenerator> generators_;
};

}  // namespace quartz
