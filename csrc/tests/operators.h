// Operators of somebody who has never heard of quartz, for the tests of the fallback: namespace quartz_test, kernels
// for CPU and CUDA only. Each refuses a tensor that is not on the native device.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <utility>
#include <vector>

namespace quartz::test {

using Stack = torch::jit::Stack;

c10::OperatorHandle find_operator(const std::string& name);

// Calls quartz_test::`name` through the dispatcher, boxed: any argument types, all results.
template <class... Arguments>
std::vector<c10::IValue> call(const std::string& name, Arguments&&... arguments) {
  Stack stack{c10::IValue(std::forward<Arguments>(arguments))...};
  find_operator("quartz_test::" + name).callBoxed(stack);
  return stack;
}

// The same for operators with one tensor as result.
template <class... Arguments>
at::Tensor call_one(const std::string& name, Arguments&&... arguments) {
  return call(name, std::forward<Arguments>(arguments)...).at(0).toTensor();
}

// What the kernel of the last call got, in order: "cpu", "undefined", "none" ...
std::vector<std::string>& seen();

}  // namespace quartz::test
