// Registration of an own kernel, counted: `own_kernel<&add>(library, "add.Tensor")`.
#pragma once

#include <torch/library.h>
#include <utility>

#include "aten/op_counts.h"

namespace quartz {

template <auto Kernel>
struct Counted;

template <class Result, class... Arguments, Result (*Kernel)(Arguments...)>
struct Counted<Kernel> {
  static inline OpCounter* counter = nullptr;
  static Result call(Arguments... arguments) {
    counter->count_own();
    return Kernel(std::forward<Arguments>(arguments)...);
  }
};

template <auto Kernel>
void own_kernel(torch::Library& library, const char* name) {
  Counted<Kernel>::counter = &op_counter(std::string("aten::") + name);
  library.impl(name, TORCH_FN(Counted<Kernel>::call));
}

}  // namespace quartz
