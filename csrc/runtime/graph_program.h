// What a graph of the host substrate holds: calls in order, their arguments, and whose memory they use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <unordered_map>
#include <vector>

namespace quartz {

// A tensor of its own over the same storage: what is done to the caller's tensor object later (transpose_, set_, .data)
// does not change the call.
at::Tensor recorded_copy(const at::Tensor& tensor);

// Calls `visit` for every tensor in a value, also inside lists, tuples and dictionaries, in order.
void visit_tensors(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit);
// The value with every tensor exchanged.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map);

class Program {
 public:
  // A tensor that a call makes anew in each replay: its memory becomes that of the recorded storage.
  struct Result {
    std::size_t position;  // among the tensors that the call returns
    std::size_t storage;
    at::Tensor tensor;
    bool shared;  // its storage is an argument's or an earlier result's: there is nothing to move
  };
  struct Call {
    explicit Call(const c10::OperatorHandle& handle) : op(handle), name(handle.operator_name()) {}

    c10::OperatorHandle op;
    c10::OperatorName name;  // finds the operator again when operators were removed since
    std::vector<c10::IValue> arguments;
    std::vector<Result> results;
    std::size_t returned = 0;  // tensors
    c10::DeviceIndex device = 0;
    bool inference = false, grad = false;
    bool below_autograd = true;
    std::vector<std::size_t> releases;  // intermediate storages that no later call uses
  };
  // Uninitialised memory (torch.empty) before a call.
  struct Allocation {
    std::size_t before;  // the index of that call
    std::size_t storage;
  };

  // The index of a storage in this graph. One that the graph has not made is the caller's: it is used where it lies.
  std::size_t storage_index(const c10::Storage& storage);
  bool knows(const c10::StorageImpl& storage) const { return indices_.count(&storage) != 0; }
  bool made_here(const c10::StorageImpl& storage) const;
  // A new storage that a call, or torch.empty, has made.
  std::size_t add_made(const c10::Storage& storage);
  // The tensor as it is to be kept in a call.
  at::Tensor keep(const at::Tensor& tensor);

  void add_call(Call call) { calls_.push_back(std::move(call)); }
  void add_allocation(std::size_t storage) { allocations_.push_back({calls_.size(), storage}); }

  // Frees the memory of storages that only this graph still holds; they are intermediate results from now on.
  void release_dead();
  // After the last call: when each intermediate storage is used last.
  void plan();
  void replay();
  void dump(std::ostream& out) const;
  std::size_t size() const { return calls_.size(); }

 private:
  struct Known {
    c10::Storage storage;
    bool made = false, dead = false;
    std::size_t copies = 0;  // kept tensors over it
    std::size_t bytes = 0;   // of the caller's storages, when they were first used
  };

  void check_callers_memory() const;
  void find_operators_again();
  void run(Call& call, std::vector<c10::IValue>& stack);
  void take_result(const Call& call, const Result& result, const at::Tensor& fresh);
  void release_intermediates() noexcept;

  std::vector<Call> calls_;
  std::vector<Allocation> allocations_;
  std::vector<Known> storages_;
  std::vector<std::size_t> living_;  // made here and not dead
  std::unordered_map<const c10::StorageImpl*, std::size_t> indices_;
  uint64_t removals_ = 0;  // operators removed in this process when the handles were last looked up
};

// Counts the operators that were removed in this process.
uint64_t operator_removals();

}  // namespace quartz
