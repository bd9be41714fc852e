// torch.autocast("quartz"): PyTorch's own cast policies (lower precision for products, fp32 for sensitive reductions,
// promotion for the rest), by its own operator lists.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast_quartz {

// The macros name operators unqualified, relative to at::.
void register_operators(torch::Library& m) {
#define QUARTZ_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(QUARTZ_LOWER_PRECISION)
#undef QUARTZ_LOWER_PRECISION
#define QUARTZ_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(QUARTZ_FP32)
#undef QUARTZ_FP32
#define QUARTZ_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(QUARTZ_FP32_SET_OPT_DTYPE)
#undef QUARTZ_FP32_SET_OPT_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define QUARTZ_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(QUARTZ_PROMOTE)
#undef QUARTZ_PROMOTE
}

}  // namespace at::autocast_quartz

#include "aten/registration.h"

namespace quartz {

void register_autocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  permanent_library("_", key).fallback(torch::CppFunction::makeFallthrough());
  at::autocast_quartz::register_operators(permanent_library("aten", key));
}

}  // namespace quartz
