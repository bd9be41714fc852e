// What the operators of linear layers share.
#pragma once

#include "kernels/matmul.h"

#include <c10/util/string_view.h>

namespace quartz {

// By its name: none, relu, silu, gelu, gelu_tanh, gelu_quick; ValueError for another.
kernels::Activation linear_activation(const char* op, c10::string_view name);

}  // namespace quartz
