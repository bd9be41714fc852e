// The alias tensors of one operator call are used again by the thread's next one: to fill the fields of a TensorImpl
// costs less than half of making and destroying it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace quartz {

// A strided tensor over `storage` with these keys and the dtype, sizes, strides, offset, conj, neg and wrapped-number
// bits of `original`. It has no version counter. To be handed back with give_back_alias, else it is destroyed like any
// other tensor.
at::Tensor take_alias(c10::Storage storage, c10::DispatchKeySet keys, const c10::TensorImpl& original);

// Drops the reference to an alias that take_alias made. Where it was the only one the object is kept for the next call;
// an alias that somebody else holds (a kernel that stored its argument) stays theirs alone.
void give_back_alias(at::Tensor&& alias) noexcept;

// How many aliases this thread keeps at the moment.
std::size_t kept_aliases();

}  // namespace quartz
