// One process, two accelerators: backward passes of plain "cuda" tensors after libquartz.so was loaded.
//
// PyTorch knows one accelerator per process, at::accelerator::getAccelerator(), and a registered PrivateUse1 device
// takes the place of CUDA. The autograd engine asks it for the streams of a graph's nodes, finds none on a CUDA graph
// and stops with an internal assertion. PyTorch has no hook for this, so the engine's own calls of that function, which
// go through the procedure linkage table of libtorch_cpu.so, are redirected: inside an AcceleratorScope they give the
// scope's device type, elsewhere what PyTorch says. The scope is thread-local and travels with at::ThreadLocalState
// into the engine's device threads, so CUDA and quartz graphs may run backward in several threads at a time.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/edge.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/export.h"

namespace quartz {

// Redirects the engine's calls; does nothing when they already are. RuntimeError with the cause where it is impossible.
// Not to be called while a backward pass is running.
QUARTZ_API void redirect_accelerator();

// Takes the redirection back.
QUARTZ_API void restore_accelerator();

QUARTZ_API bool accelerator_is_redirected();

// While it lives, the autograd engine takes devices of `type` for the accelerator, in this thread and in the device
// threads that work for a backward() started here. Redirects at the first use, so it throws like
// redirect_accelerator().
//
//   {
//     quartz::AcceleratorScope scope(c10::DeviceType::CUDA);
//     loss.backward();  // a graph of "cuda" tensors
//   }
class QUARTZ_API AcceleratorScope {
 public:
  explicit AcceleratorScope(c10::DeviceType type);

 private:
  c10::DebugInfoGuard guard_;
};

// The device type of the innermost scope of this thread.
QUARTZ_API std::optional<c10::DeviceType> scoped_accelerator();

// Which of the two devices of a substrate the graph below `roots` uses.
struct GraphAccelerators {
  bool quartz = false;
  bool native = false;
};

// Walks the graph until the first node on quartz or on `native`, or all of it if `whole`.
QUARTZ_API GraphAccelerators graph_accelerators(const std::vector<const torch::autograd::Node*>& roots,
                                                c10::DeviceType native, bool whole);

}  // namespace quartz
