// How a file of this folder brings its operators: `QUARTZ_OPERATORS(rms_norm) { operators.define(...); ... }`.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <array>

#include "aten/fallback.h"
#include "aten/own_kernel.h"

namespace quartz {

class Operators {
 public:
  Operators();

  // An operator of namespace quartz, by its schema without the namespace.
  void define(const char* schema);
  // Its kernel for quartz, CPU and CUDA tensors; calls on quartz tensors are counted.
  template <auto Kernel>
  void implement(const char* name) {
    Counted<Kernel>::counter = &op_counter(std::string("quartz::") + name);
    on_quartz_.impl(name, TORCH_FN(Counted<Kernel>::call));
    for (auto* library : native_) library->impl(name, torch::CppFunction::makeFromUnboxedFunction(Kernel));
  }
  // An own kernel of an operator of PyTorch, for quartz tensors. It calls `fallback_of` for what it does not serve.
  template <auto Kernel>
  void replace(const char* name) {
    own_kernel<Kernel>(aten_, name);
  }

 private:
  torch::Library &definitions_, &on_quartz_, &aten_;
  std::vector<torch::Library*> native_;
};

// Runs the native device's kernel of an operator with N results through the fallback.
template <class Op, std::size_t N, class... Arguments>
std::array<at::Tensor, N> fallback_of_many(Arguments&&... arguments) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  torch::jit::Stack stack;
  torch::jit::push(stack, std::forward<Arguments>(arguments)...);
  fallback(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
  std::array<at::Tensor, N> results;
  for (std::size_t i = 0; i < N; ++i) results[i] = stack[stack.size() - N + i].toTensor();
  return results;
}

// The same for operators with one result, which `out=` variants return too: `fallback_of<at::_ops::mm>(self, mat2)`.
template <class Op, class... Arguments>
at::Tensor fallback_of(Arguments&&... arguments) {
  return std::move(fallback_of_many<Op, 1>(std::forward<Arguments>(arguments)...)[0]);
}

struct OperatorFile {
  explicit OperatorFile(void (*body)(Operators&));
};
void register_operator_files();  // registration.cpp calls it once

}  // namespace quartz

// Constructed before the library registers itself, which happens at default priority.
#define QUARTZ_OPERATORS(NAME)                                             \
  static void register_operators_of_##NAME(quartz::Operators& operators);  \
  static const quartz::OperatorFile operators_of_##NAME                    \
      __attribute__((init_priority(200))) (&register_operators_of_##NAME); \
  static void register_operators_of_##NAME(quartz::Operators& operators)
