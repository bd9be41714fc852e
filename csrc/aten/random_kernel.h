// How the operators that draw from a generator's counter (runtime/generator.h) call the kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/random_fill.h"

namespace quartz {

// True for float32, float16, bfloat16 and float64.
bool has_random_type(const at::Tensor& tensor);
kernels::RandomType random_type(const at::Tensor& tensor);

// Fills `self` by the formulas of kernels/random_fill.h, whatever its strides: result, count and type of `fill` are
// those of `self`, everything else is given. Bernoulli numbers fit any dtype.
void fill_random(const at::Tensor& self, kernels::RandomFill fill);

// The same with numbers from a generator, which uses up random_blocks() of its counter.
void draw_random(const at::Tensor& self, kernels::RandomFill fill, const std::optional<at::Generator>& generator);

}  // namespace quartz
