// quartz::gated_delta_rule; formula and order of arithmetic in kernels/gated_delta_rule.h.
#include "kernels/gated_delta_rule.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

std::tuple<at::Tensor, at::Tensor> gated_delta_rule(const at::Tensor& query, const at::Tensor& key,
                                                    const at::Tensor& value, const at::Tensor& g,
                                                    const at::Tensor& beta, const std::optional<at::Tensor>& state) {
  const char* op = "quartz::gated_delta_rule";
  QUARTZ_CHECK_ARGUMENT(key.dim() == 4, op, "key", "have the shape (batch, tokens, key heads, key size)", key.sizes());
  QUARTZ_CHECK_ARGUMENT(value.dim() == 4, op, "value", "have the shape (batch, tokens, heads, value size)",
                        value.sizes());
  const int64_t batch = key.size(0), length = key.size(1), key_heads = key.size(2), key_size = key.size(3);
  const int64_t heads = value.size(2), value_size = value.size(3);
  QUARTZ_CHECK_ARGUMENT(key_heads > 0 ? heads % key_heads == 0 : heads == 0, op, "value",
                        "have a multiple of the heads of key", heads, " and ", key_heads);
  const auto prepared = [&](const char* name, const at::Tensor& given, at::IntArrayRef sizes) {
    QUARTZ_CHECK_ARGUMENT(given.sizes() == sizes, op, name, "have the shape " + c10::str(sizes), given.sizes());
    QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(given), op, name, "be float32, float16 or bfloat16", given.scalar_type());
    check_same_device(op, {{"key", key}, {name, given}});
    return given.to(at::kFloat).contiguous();
  };
  const c10::DeviceGuard guard(key.device());
  const std::array<int64_t, 4> kept{batch, heads, key_size, value_size};
  const auto q = prepared("query", query, {batch, length, key_heads, key_size}),
             k = prepared("key", key, {batch, length, key_heads, key_size}),
             v = prepared("value", value, {batch, length, heads, value_size}),
             decay = prepared("g", g, {batch, length, heads}), rate = prepared("beta", beta, {batch, length, heads});
  at::Tensor s;
  if (state && state->defined()) {
    s = prepared("state", *state, kept);
    if (s.is_alias_of(*state)) s = s.clone();
  } else {
    s = at::zeros(kept, k.options());
  }
  auto o = at::empty_like(v);
  const kernels::GatedDeltaRule arguments{q.const_data_ptr<float>(),
                                          k.const_data_ptr<float>(),
                                          v.const_data_ptr<float>(),
                                          decay.const_data_ptr<float>(),
                                          rate.const_data_ptr<float>(),
                                          s.mutable_data_ptr<float>(),
                                          o.mutable_data_ptr<float>(),
                                          batch,
                                          length,
                                          key_heads,
                                          heads,
                                          key_size,
                                          value_size};
  QUARTZ_RUN_KERNEL(gated_delta_rule, key, arguments);
  return {o, s};
}

}  // namespace

QUARTZ_OPERATORS(gated_delta_rule) {
  operators.define(
      "gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? state=None) "
      "-> (Tensor, Tensor)");
  operators.implement<&gated_delta_rule>("gated_delta_rule");
}

}  // namespace quartz
