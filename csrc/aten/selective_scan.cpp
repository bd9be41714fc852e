// quartz::selective_scan; formula and order of arithmetic in kernels/selective_scan.h.
#include "kernels/selective_scan.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

std::tuple<at::Tensor, at::Tensor> selective_scan(const at::Tensor& x, const at::Tensor& dt, const at::Tensor& a,
                                                  const at::Tensor& b, const at::Tensor& c,
                                                  const std::optional<at::Tensor>& d,
                                                  const std::optional<at::Tensor>& z,
                                                  const std::optional<at::Tensor>& dt_bias, bool dt_softplus,
                                                  const std::optional<at::Tensor>& state) {
  const char* op = "quartz::selective_scan";
  QUARTZ_CHECK_ARGUMENT(x.dim() == 3, op, "x", "have the shape (batch, channels, tokens)", x.sizes());
  QUARTZ_CHECK_ARGUMENT(a.dim() == 2 && a.size(0) == x.size(1), op, "A", "have the shape (channels, states)",
                        a.sizes());
  const int64_t batch = x.size(0), channels = x.size(1), length = x.size(2), states = a.size(1);
  const auto prepared = [&](const char* name, const std::optional<at::Tensor>& given, at::IntArrayRef sizes) {
    if (!given || !given->defined()) return at::Tensor();
    QUARTZ_CHECK_ARGUMENT(given->sizes() == sizes, op, name, "have the shape " + c10::str(sizes), given->sizes());
    QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(*given), op, name, "be float32, float16 or bfloat16", given->scalar_type());
    check_same_device(op, {{"x", x}, {name, *given}});
    return given->to(at::kFloat).contiguous();
  };
  const c10::DeviceGuard guard(x.device());
  const std::array<int64_t, 3> tokens{batch, channels, length}, inputs{batch, length, states},
      kept{batch, channels, states};
  const auto xs = prepared("x", x, tokens), dts = prepared("dt", dt, tokens), zs = prepared("z", z, tokens);
  const auto as = prepared("A", a, {channels, states}), bs = prepared("B", b, inputs), cs = prepared("C", c, inputs);
  const auto ds = prepared("D", d, {channels}), biases = prepared("dt_bias", dt_bias, {channels});
  auto h = prepared("state", state, kept);
  h = h.defined() ? (h.is_alias_of(*state) ? h.clone() : h) : at::zeros(kept, xs.options());
  auto y = at::empty_like(xs);
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.const_data_ptr<float>() : nullptr;
  };
  const kernels::SelectiveScan arguments{data(xs),
                                         data(dts),
                                         data(zs),
                                         data(as),
                                         data(bs),
                                         data(cs),
                                         data(ds),
                                         data(biases),
                                         h.mutable_data_ptr<float>(),
                                         y.mutable_data_ptr<float>(),
                                         batch,
                                         channels,
                                         length,
                                         states,
                                         dt_softplus};
  QUARTZ_RUN_KERNEL(selective_scan, x, arguments);
  return {y, h};
}

}  // namespace

QUARTZ_OPERATORS(selective_scan) {
  operators.define(
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D=None, Tensor? z=None, "
      "Tensor? dt_bias=None, bool dt_softplus=False, Tensor? state=None) -> (Tensor, Tensor)");
  operators.implement<&selective_scan>("selective_scan");
}

}  // namespace quartz
