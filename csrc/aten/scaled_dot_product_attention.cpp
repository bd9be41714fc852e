// scaled_dot_product_attention: which native kernel serves a call, and the operators PyTorch routes other devices to.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

bool can_be_aliased(const at::Tensor& tensor) {
  return !tensor.defined() || (tensor.has_storage() && !tensor.key_set().has_any(c10::python_ks));
}

// The native chooser. It runs above the Python and functorch keys, so that a FakeTensor or a batched tensor may arrive
// here, which has no alias: the chooser is then asked about the tensor itself, since it reads metadata only.
int64_t fused_sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool enable_gqa) {
  const c10::DispatchKeySet native(substrate().keys().dense);
  using Choice = at::_ops::_fused_sdp_choice;
  const bool masked = mask && mask->defined();
  int64_t choice = 0;
  if (can_be_aliased(query) && can_be_aliased(key) && can_be_aliased(value) && (!masked || can_be_aliased(*mask))) {
    const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
    AliasScope scope;
    const auto native_mask = masked ? std::optional(scope.to_native(*mask)) : std::nullopt;
    choice = Choice::redispatch(native, scope.to_native(query), scope.to_native(key), scope.to_native(value),
                                native_mask, dropout, causal, scale, enable_gqa);
  } else {
    choice = Choice::redispatch(native, query, key, value, mask, dropout, causal, scale, enable_gqa);
  }
  // PyTorch sends "flash" of a device that is not CUDA to the CPU's flash operator: on cuda, take the overrideable way.
  if (substrate().is_cuda() && choice == static_cast<int64_t>(sdp::SDPBackend::flash_attention)) {
    return static_cast<int64_t>(sdp::SDPBackend::overrideable);
  }
  return choice;
}

using AttentionOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt,
                                    at::Tensor, at::Tensor, at::Tensor>;

// The flash kernel wants head sizes in multiples of 8; zeros behind change neither scores nor values.
int64_t padding_of(int64_t head_size) { return (8 - head_size % 8) % 8; }
at::Tensor pad_head(const at::Tensor& tensor) {
  const auto padding = padding_of(tensor.size(-1));
  return padding == 0 ? tensor : at::pad(tensor, {0, padding});
}

// The flash kernel keeps its random state as one uint64 pair; the overrideable operator's contract is an int64 seed and
// an int64 offset of shape ().
std::pair<at::Tensor, at::Tensor> split_random_state(const at::Tensor& state, const at::Tensor& query) {
  if (!state.defined() || state.numel() != 2) {
    const auto zero = at::zeros({}, query.options().dtype(at::kLong));
    return {zero, zero.clone()};
  }
  const auto words = state.view(at::kLong);
  return {words.select(0, 0), words.select(0, 1)};
}

at::Tensor join_random_state(const at::Tensor& seed, const at::Tensor& offset) {
  return at::stack({seed, offset}).view(at::kUInt64);
}

AttentionOutputs attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& bias, double dropout, bool causal, bool return_debug_mask,
                           std::optional<double> scale) {
  TORCH_CHECK(!bias || !bias->defined(), "quartz: _scaled_dot_product_fused_attention_overrideable: attn_bias is not ",
              "supported by the flash kernel behind it; call scaled_dot_product_attention, which chooses another");
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const auto head_size = query.size(-1), value_size = value.size(-1);
  const double factor = scale.value_or(1. / std::sqrt(static_cast<double>(head_size)));
  const auto native_query = scope.to_native(query);
  auto [output, logsumexp, cum_q, cum_k, max_q, max_k, state, unused, debug] = at::_scaled_dot_product_flash_attention(
      pad_head(native_query), pad_head(scope.to_native(key)), pad_head(scope.to_native(value)), dropout, causal,
      return_debug_mask, factor);
  if (output.size(-1) != value_size) output = output.narrow(-1, 0, value_size);
  if (!return_debug_mask) debug = at::Tensor();
  const auto [seed, offset] = split_random_state(state, native_query);
  return {
      scope.to_quartz(output), scope.to_quartz(logsumexp), scope.to_quartz(cum_q), scope.to_quartz(cum_k), max_q, max_k,
      scope.to_quartz(seed),   scope.to_quartz(offset),    scope.to_quartz(debug)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor&, std::array<bool, 4>, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor& cum_q, const at::Tensor& cum_k, int64_t max_q, int64_t max_k, double dropout, bool causal,
    const at::Tensor& seed, const at::Tensor& offset, std::optional<double> scale) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const double factor = scale.value_or(1. / std::sqrt(static_cast<double>(query.size(-1))));
  const auto native_seed = scope.to_native(seed);
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_backward(
      pad_head(scope.to_native(grad_output)), pad_head(scope.to_native(query)), pad_head(scope.to_native(key)),
      pad_head(scope.to_native(value)), pad_head(scope.to_native(output)), scope.to_native(logsumexp),
      scope.to_native(cum_q), scope.to_native(cum_k), max_q, max_k, dropout, causal,
      join_random_state(native_seed, scope.to_native(offset)), at::empty({}, native_seed.options()), factor);
  const auto cut = [&](const at::Tensor& gradient, const at::Tensor& like) {
    return scope.to_quartz(gradient.size(-1) == like.size(-1) ? gradient : gradient.narrow(-1, 0, like.size(-1)));
  };
  return {cut(grad_q, query), cut(grad_k, key), cut(grad_v, value), at::Tensor()};
}

}  // namespace

void register_attention(torch::Library& library) {
  if (!substrate().is_cuda()) return;  // the CPU's chooser answers with operators the fallback serves
  own_kernel<&attention>(library, "_scaled_dot_product_fused_attention_overrideable");
  own_kernel<&attention_backward>(library, "_scaled_dot_product_fused_attention_overrideable_backward");
}

}  // namespace quartz

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &quartz::fused_sdp_choice)
}  // namespace at::native
