// Views: sizes and strides only, no native kernel and no alias needed.
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>

#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {

void register_views(torch::Library& library) {
  own_kernel<&at::native::as_strided_tensorimpl>(library, "as_strided");
  own_kernel<&at::native::view>(library, "view");
  own_kernel<&at::native::_reshape_alias>(library, "_reshape_alias");
}

}  // namespace quartz
