// quartz::gated_activation and quartz::silu_and_mul; formulas in kernels/gated_activation.h.
#include "kernels/gated_activation.h"

#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/registration.h"
#include "aten/rows.h"

namespace quartz {
namespace {

using kernels::GluActivation;

constexpr const char* kOp = "quartz::gated_activation";

GluActivation activation_of(c10::string_view name) {
  if (name == "silu") return GluActivation::kSilu;
  if (name == "gelu") return GluActivation::kGelu;
  if (name == "gelu_tanh") return GluActivation::kGeluTanh;
  if (name == "relu") return GluActivation::kRelu;
  if (name == "relu2") return GluActivation::kReluSquared;
  TORCH_CHECK_VALUE(name == "clamped_swiglu", kOp,
                    ": activation must be one of silu, gelu, gelu_tanh, relu, relu2 and clamped_swiglu, got ", name);
  return GluActivation::kClampedSwiglu;
}

at::Tensor gated_activation(const at::Tensor& gate, const std::optional<at::Tensor>& up_given,
                            c10::string_view activation, bool interleaved, bool round_first, double alpha,
                            double limit) {
  const auto up = up_given.value_or(at::Tensor());
  const bool packed = !up.defined();
  kernels::GatedActivation a{};
  a.activation = activation_of(activation);
  QUARTZ_CHECK_ARGUMENT(gate.dim() >= 1, kOp, "gate", "have at least one dimension", "a scalar");
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(gate), kOp, "gate", "be float32, float16 or bfloat16", gate.scalar_type());
  check_same_device(kOp, {{"gate", gate}, {"up", up}});
  QUARTZ_CHECK_ARGUMENT(packed || !interleaved, kOp, "up", "be None where interleaved is true", "a tensor");
  QUARTZ_CHECK_ARGUMENT(packed || up.sizes() == gate.sizes(), kOp, "up", "have the shape of gate", up.sizes());
  QUARTZ_CHECK_ARGUMENT(packed || up.scalar_type() == gate.scalar_type(), kOp, "up", "have the dtype of gate",
                        up.scalar_type());
  QUARTZ_CHECK_ARGUMENT(!packed || gate.size(-1) % 2 == 0, kOp, "the last dimension of gate",
                        "be even where it holds both halves", gate.size(-1));
  const c10::DeviceGuard guard(gate.device());
  c10::SmallVector<int64_t, 6> sizes(gate.sizes().begin(), gate.sizes().end());
  if (packed) sizes.back() /= 2;
  auto y = empty_like_rows(gate, sizes, gate.scalar_type());
  if (y.numel() == 0) return y;

  const auto gates = rows_of(gate);
  a.gate = gates.data();
  a.gate_stride = gates.stride;
  a.rows = gates.count;
  a.width = sizes.back();
  Rows ups{};
  if (!packed) {
    ups = rows_of(up);
    a.up = ups.data();
    a.up_stride = ups.stride;
  } else if (!interleaved) {
    a.up = static_cast<const char*>(a.gate) + a.width * gate.element_size();
    a.up_stride = a.gate_stride;
  }
  a.y = y.mutable_data_ptr();
  a.interleaved = interleaved;
  a.round_first = round_first;
  a.alpha = static_cast<float>(alpha);
  a.limit = static_cast<float>(limit);
  a.dtype = kernel_dtype(gate);
  QUARTZ_RUN_KERNEL(gated_activation, gate, a);
  return y;
}

// A composite: it runs gated_activation, with its gradient.
at::Tensor silu_and_mul(const at::Tensor& x) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow(kOp, "")
                             .typed<at::Tensor(const at::Tensor&, const std::optional<at::Tensor>&, c10::string_view,
                                               bool, bool, double, double)>();
  return op.call(x, std::nullopt, "silu", false, false, 1.702, 7.);
}

}  // namespace

QUARTZ_OPERATORS(gated_activation) {
  operators.define(
      "gated_activation(Tensor gate, Tensor? up=None, str activation=\"silu\", *, bool interleaved=False, "
      "bool round_first=False, float alpha=1.702, float limit=7.) -> Tensor");
  operators.implement<&gated_activation>("gated_activation");
  operators.define("silu_and_mul(Tensor x) -> Tensor");
  permanent_library("quartz", c10::DispatchKey::CompositeImplicitAutograd).impl("silu_and_mul", TORCH_FN(silu_and_mul));
}

}  // namespace quartz
