// One call of a function that was compiled for the native device (an Inductor graph) with quartz tensors.
//
// It differs from AliasScope in what a whole graph needs: several quartz devices in one call, and inputs that the
// function may free while it runs. So no input is kept alive here: an input's storage is remembered weakly, to be found
// again when an output shares its memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "runtime/allocator.h"

namespace quartz {

class QUARTZ_API CompiledCall {
 public:
  // The native alias of an input; tensors of other devices pass through.
  at::Tensor to_native(const at::Tensor& input);

  // A native output as a tensor of quartz:`device`. One that shares memory with an input or with an earlier output of
  // the same device shares its storage; memory that already belongs to another quartz device is copied.
  at::Tensor to_quartz(const at::Tensor& output, c10::DeviceIndex device);

  // An output that was asked for on the native device itself (host: a graph with .to("cpu")): copied if the compiled
  // function saved the copy and handed out memory of a quartz tensor.
  at::Tensor keep_native(const at::Tensor& output) const;

  // After the call: quartz storages follow inputs whose memory the function resized.
  void follow_resized_inputs() const;

  // The device of the first quartz input, else the current one.
  c10::DeviceIndex device() const;

 private:
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    const c10::StorageImpl* native;
  };

  StoragePtr find(const c10::StorageImpl& native) const;

  std::vector<Known> known_;            // storages of inputs and of outputs already adopted
  std::vector<c10::Storage> borrowed_;  // inputs over memory that is not ours: nothing else keeps it for the call
  std::optional<c10::DeviceIndex> device_;
};

}  // namespace quartz
