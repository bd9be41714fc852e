// The boxed fallback: runs any operator on quartz tensors with the native device's kernel, without a copy.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "aten/op_counts.h"
#include "runtime/export.h"

namespace quartz {

// What the fallback needs to know of an operator, read from its schema once.
struct OpFacts {
  enum class Kind : uint8_t {
    kTensor,
    kTensorList,
    kOptionalTensorList,
    kNested,
    kDevice,
    kGenerator,
    kStorage,
    kStream
  };
  struct Argument {
    uint32_t index;
    Kind kind;
    bool written;  // in-place, out=
  };

  explicit OpFacts(const c10::FunctionSchema& schema);

  OpCounter& counter;
  std::size_t argument_count, return_count;
  c10::SmallVector<Argument, 8> arguments;     // those that need mapping; integers, scalars, dtypes ... do not
  std::vector<std::string> argument_names;     // of all
  c10::SmallVector<int, 4> returned_argument;  // per return: the written argument it is, or -1
  bool mixed_devices = false;                  // takes CPU tensors beside quartz ones by design
  bool no_scalars = false;                     // refuses 0-dim CPU tensors too (refuses_scalars)
  bool custom = false;                         // not one of PyTorch's own
  bool list_writer = false;                    // writes a list and returns nothing: in-place foreach, fused optimisers
};

// Registered as the backend fallback of every PrivateUse1 key.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// The same as a kernel of one operator, with its facts at hand.
class FallbackKernel final : public c10::OperatorKernel {
 public:
  explicit FallbackKernel(const c10::FunctionSchema& schema) : facts_(schema) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

 private:
  OpFacts facts_;
};

// An operator was removed: another one may take its name and place.
void forget_facts(const c10::OperatorHandle& op);

// The native keys to dispatch to for a call whose arguments have these keys.
c10::DispatchKeySet native_dispatch_keys(c10::DispatchKeySet keys);

}  // namespace quartz
