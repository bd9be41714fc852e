// scaled_dot_product_attention: which kernel serves a call, and the operators PyTorch routes other devices to.
//
// Calls without dropout in float32, float16 and bfloat16 run the kernel of quartz::attention, with and without
// gradients, so that both give the same bits. The rest is PyTorch's.
#include <ATen/Context.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_scaled_dot_product_fused_attention_overrideable_backward_ops.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "aten/alias.h"
#include "aten/attention_call.h"
#include "aten/kernel_support.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

bool can_be_aliased(const at::Tensor& tensor) {
  return !tensor.defined() || (tensor.has_storage() && !tensor.key_set().has_any(c10::python_ks));
}

// Tensors within vmap or torch.func.grad (which may hold one within vmap): the operator has no batching rule.
constexpr c10::DispatchKeySet kTransformed({c10::DispatchKey::FuncTorchBatched,
                                            c10::DispatchKey::FuncTorchGradWrapper});

// What the kernel of quartz::attention serves, read from metadata only: the arguments may be fake.
bool is_ours(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& mask,
             double dropout, bool causal, bool enable_gqa) {
  if (dropout > 0) return false;
  const auto& context = at::globalContext();
  if (!context.userEnabledFlashSDP() && !context.userEnabledOverrideableSDP()) return false;  // sdpa_kernel(MATH)
  const int64_t dims = query.dim();
  for (const auto* tensor : {&query, &key, &value}) {
    if (tensor->layout() != at::kStrided || tensor->is_nested() || !has_kernel_dtype(*tensor) ||
        tensor->scalar_type() != query.scalar_type() || tensor->dim() != dims || tensor->device() != query.device() ||
        tensor->key_set().has_any(kTransformed) || tensor->_fw_grad(0).defined()) {
      return false;
    }
  }
  if (dims != 4 || query.device().type() != kQuartz) return false;
  const auto q = query.sym_sizes(), k = key.sym_sizes(), v = value.sym_sizes();
  const auto heads = q[1], kv_heads = k[1];
  if (q[0] != k[0] || q[0] != v[0] || v[1] != kv_heads || v[2] != k[2] || k[3] != q[3]) return false;
  if (query.sym_numel() == 0 || key.sym_numel() == 0 || value.sym_numel() == 0) return false;
  if (heads != kv_heads && (!enable_gqa || heads % kv_heads != 0)) return false;
  if (!mask.defined()) return true;
  if (causal || mask.layout() != at::kStrided || mask.is_nested() || mask.dim() > 4 ||
      mask.device() != query.device() || mask.key_set().has_any(kTransformed) ||
      (mask.scalar_type() != at::kBool && !has_kernel_dtype(mask))) {
    return false;
  }
  const c10::SymInt whole[4] = {q[0], heads, q[2], k[2]};
  for (int64_t i = 0; i < mask.dim(); ++i) {
    const auto size = mask.sym_size(mask.dim() - 1 - i);
    if (size != 1 && size != whole[3 - i]) return false;
  }
  return true;
}

// The native chooser, for what is not ours. It runs above the Python and functorch keys, so that a FakeTensor or a
// batched tensor may arrive here, which has no alias: the chooser is then asked about the tensor itself, since it reads
// metadata only.
int64_t fused_sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool enable_gqa) {
  const c10::DispatchKeySet native(substrate().keys().dense);
  using Choice = at::_ops::_fused_sdp_choice;
  const bool masked = mask && mask->defined();
  if (masked && mask->device().type() == kQuartz && mask->device() != query.device()) {
    throw_mixed_devices(query.device(), mask->device(), "aten::scaled_dot_product_attention", "attn_mask");
  }
  if (is_ours(query, key, value, masked ? *mask : at::Tensor(), dropout, causal, enable_gqa)) {
    return static_cast<int64_t>(sdp::SDPBackend::overrideable);
  }
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

AttentionOutputs flash_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                 const std::optional<at::Tensor>& bias, double dropout, bool causal,
                                 bool return_debug_mask, std::optional<double> scale) {
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

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(
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

// ---- own ----------------------------------------------------------------------------------------------------------

// In the order of the query's strides, as PyTorch's meta function has it.
at::Tensor output_like(const at::Tensor& query, int64_t value_size) {
  if (query.size(-1) == value_size) return at::empty_like(query);
  std::array<int64_t, 4> order{0, 1, 2, 3};
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return query.stride(a) > query.stride(b); });
  auto sizes = query.sizes().vec();
  sizes[3] = value_size;
  std::vector<int64_t> strides(4);
  int64_t stride = 1;
  for (int i = 3; i >= 0; --i) {
    strides[order[i]] = stride;
    stride *= sizes[order[i]];
  }
  return at::empty_strided(sizes, strides, query.options());
}

at::Tensor zero_scalar(const at::Tensor& like) { return at::zeros({}, like.options().dtype(at::kLong)); }

AttentionOutputs own_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               const std::optional<at::Tensor>& bias, double dropout, bool causal,
                               bool /*return_debug_mask*/, std::optional<double> scale) {
  const char* op = "_scaled_dot_product_fused_attention_overrideable";
  const auto mask = bias.value_or(at::Tensor());
  TORCH_CHECK(is_ours(query, key, value, mask, dropout, causal, true), "quartz: ", op,
              ": takes float32, float16 or bfloat16 tensors of 4 dimensions without dropout, a mask that ",
              "broadcasts, and not both a mask and is_causal; call scaled_dot_product_attention, which chooses");
  auto out = output_like(query, value.size(-1));
  const auto q = with_contiguous_rows(query), k = with_contiguous_rows(key), v = with_contiguous_rows(value);
  const bool direct = out.stride(-1) == 1 || out.size(-1) == 1;
  const auto rows = direct ? out : at::empty(out.sizes(), out.options());
  auto logsumexp = at::empty({q.size(0), q.size(1), q.size(2)}, q.options().dtype(at::kFloat));
  auto arguments = dense_attention(q, k, v, rows, attention_scale(scale, query.size(-1)));
  arguments.causal = causal;  // query_offset 0: PyTorch's triangle begins at the upper left
  arguments.logsumexp = logsumexp.mutable_data_ptr<float>();
  arguments.logsumexp_strides = attention_strides(logsumexp);
  if (mask.defined()) set_attention_mask(arguments, mask);
  run_attention(op, arguments, query);
  if (!direct) out.copy_(rows);
  const auto seed = zero_scalar(query);
  return {out, logsumexp, {}, {}, query.size(-2), key.size(-2), seed, zero_scalar(query), {}};
}

// Sums of the query heads that share a key head, back in the dtype.
at::Tensor sum_groups(const at::Tensor& gradient, const at::Tensor& like) {
  if (gradient.size(1) == like.size(1)) return gradient.to(like.scalar_type());
  const int64_t group = gradient.size(1) / like.size(1);
  return gradient.unflatten(1, {like.size(1), group}).sum(2, false, at::kFloat).to(like.scalar_type());
}

struct AttentionGradients {
  at::Tensor q, k, v, bias;
};

// From the formula, one sequence at a time:  P = exp(S - logsumexp),  dV = P^T dO,  dS = P (dO V^T - rowsum(dO O)).
AttentionGradients plain_backward(const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, const at::Tensor& mask, bool bias_gradient,
                                  const at::Tensor& output, const at::Tensor& logsumexp, bool causal, double scale) {
  AttentionGradients result{at::empty_like(query), at::empty_like(key), at::empty_like(value), {}};
  if (bias_gradient) result.bias = at::zeros(mask.sizes(), mask.options().dtype(at::kFloat));
  const int64_t group = query.size(1) / key.size(1), keys = key.size(2), queries = query.size(2);
  at::Tensor hidden;
  if (causal) {
    const auto options = query.options().dtype(at::kLong);
    hidden = at::arange(keys, options).unsqueeze(0) > at::arange(queries, options).unsqueeze(1);
  }
  for (int64_t b = 0; b < query.size(0); ++b) {
    const auto one = [&](const at::Tensor& tensor) { return tensor.select(0, b).to(at::kFloat); };
    const auto q = one(query), out = one(output), grad = one(grad_output);
    const auto k = one(key).repeat_interleave(group, 0), v = one(value).repeat_interleave(group, 0);
    auto scores = at::matmul(q, k.transpose(1, 2)).mul_(scale);
    if (mask.defined()) scores.add_(mask.dim() == 4 ? mask.select(0, mask.size(0) == 1 ? 0 : b) : mask);
    if (hidden.defined()) scores.masked_fill_(hidden, -std::numeric_limits<double>::infinity());
    const auto shift = logsumexp.select(0, b).unsqueeze(-1);
    const auto p = scores.sub_(shift).exp_().masked_fill_(shift == -std::numeric_limits<double>::infinity(), 0);
    const auto delta = grad.mul(out).sum(-1, true);
    const auto grad_scores = at::matmul(grad, v.transpose(1, 2)).sub_(delta).mul_(p);
    // What a row does not see has the gradient 0, whatever its value holds.
    grad_scores.masked_fill_(p == 0, 0);
    result.q.select(0, b).copy_(at::matmul(grad_scores, k).mul_(scale));
    const auto per_group = [&](const at::Tensor& gradient) {
      return gradient.unflatten(0, {key.size(1), group}).sum(1);
    };
    result.k.select(0, b).copy_(per_group(at::matmul(grad_scores.transpose(1, 2), q).mul_(scale)));
    result.v.select(0, b).copy_(per_group(at::matmul(p.transpose(1, 2), grad)));
    if (bias_gradient) {
      auto place = mask.dim() == 4 && mask.size(0) != 1 ? result.bias.select(0, b) : result.bias;
      const auto whole = mask.dim() == 4 && mask.size(0) == 1 ? grad_scores.unsqueeze(0) : grad_scores;
      place.add_(at::sum_to(whole, place.sizes()));
    }
  }
  if (bias_gradient) result.bias = result.bias.to(mask.scalar_type());
  return result;
}

// PyTorch's flash kernel puts the triangle of a causal call at the lower right: the same if there are as many keys.
bool flash_takes_backward(const at::Tensor& query, const at::Tensor& key, bool causal) {
  return query.scalar_type() != at::kFloat && query.size(3) <= 256 && (!causal || query.size(2) == key.size(2));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> own_attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> needed, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor&, const at::Tensor&, int64_t, int64_t, double, bool causal, const at::Tensor&, const at::Tensor&,
    std::optional<double> scale) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  const double factor = attention_scale(scale, query.size(-1));
  const auto q = scope.to_native(query), k = scope.to_native(key), v = scope.to_native(value),
             grad = scope.to_native(grad_output), out = scope.to_native(output), lse = scope.to_native(logsumexp);
  const auto mask = bias.defined() ? scope.to_native(bias) : at::Tensor();
  AttentionGradients result;
  const bool fused = !mask.defined() && v.size(3) == q.size(3);
  if (fused && substrate().is_cuda() && flash_takes_backward(q, k, causal)) {
    const auto padded = [](const at::Tensor& tensor) { return pad_head(tensor); };
    const auto state = at::zeros({2}, q.options().dtype(at::kLong)).view(at::kUInt64);
    std::tie(result.q, result.k, result.v) = at::_scaled_dot_product_flash_attention_backward(
        padded(grad), padded(q), padded(k), padded(v), padded(out), lse, at::Tensor(), at::Tensor(), q.size(2),
        k.size(2), 0., causal, state, at::empty({}, q.options().dtype(at::kLong)), factor);
    for (auto* gradient : {&result.q, &result.k, &result.v}) {
      if (gradient->size(3) != q.size(3)) *gradient = gradient->narrow(-1, 0, q.size(3));
    }
  } else if (fused && !substrate().is_cuda() && (!causal || k.size(2) >= q.size(2))) {
    // Every row has keys and nothing is masked: PyTorch's fused backward pass, which takes our logsumexp.
    const int64_t group = q.size(1) / k.size(1);
    const auto wide_k = group == 1 ? k : k.repeat_interleave(group, 1);
    const auto wide_v = group == 1 ? v : v.repeat_interleave(group, 1);
    std::tie(result.q, result.k, result.v) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, wide_k, wide_v, out, lse, 0., causal, std::nullopt, factor);
    result.k = sum_groups(result.k, k);
    result.v = sum_groups(result.v, v);
  } else {
    result = plain_backward(grad, q, k, v, mask, needed[3] && mask.defined(), out, lse, causal, factor);
  }
  return {scope.to_quartz(result.q), scope.to_quartz(result.k), scope.to_quartz(result.v),
          result.bias.defined() ? scope.to_quartz(result.bias) : at::Tensor()};
}

// The gradients as differentiable operations on what they depend on, for second derivatives: PyTorch has no formula.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> differentiable_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, bool causal, double scale) {
  const int64_t group = query.size(1) / key.size(1);
  const auto wide = [&](const at::Tensor& tensor) {
    const auto floats = tensor.to(at::kFloat);
    return tensor.size(1) == query.size(1) ? floats : floats.repeat_interleave(group, 1);
  };
  const auto q = wide(query), k = wide(key), v = wide(value), grad = wide(grad_output);
  auto scores = at::matmul(q, k.transpose(-2, -1)) * scale;
  if (bias.defined()) scores = scores + bias;
  if (causal) {
    const auto options = query.options().dtype(at::kLong);
    const auto hidden = at::arange(key.size(2), options).unsqueeze(0) > at::arange(query.size(2), options).unsqueeze(1);
    scores = scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
  }
  const auto p = at::_safe_softmax(scores, -1);  // rows without keys: 0
  const auto grad_p = at::matmul(grad, v.transpose(-2, -1));
  const auto grad_scores = p * (grad_p - (grad_p * p).sum(-1, true));
  const auto narrow = [&](const at::Tensor& gradient, const at::Tensor& like) {
    const bool grouped = gradient.size(1) != like.size(1);
    return (grouped ? gradient.unflatten(1, {like.size(1), group}).sum(2) : gradient).to(like.scalar_type());
  };
  return {narrow(at::matmul(grad_scores, k) * scale, query),
          narrow(at::matmul(grad_scores.transpose(-2, -1), q) * scale, key),
          narrow(at::matmul(p.transpose(-2, -1), grad), value),
          bias.defined() ? at::sum_to(grad_scores, bias.sizes()).to(bias.scalar_type()) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> own_attention_backward_autograd(
    c10::DispatchKeySet keys, const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& bias, std::array<bool, 4> needed, const at::Tensor& output,
    const at::Tensor& logsumexp, const at::Tensor& cum_q, const at::Tensor& cum_k, c10::SymInt max_q, c10::SymInt max_k,
    double dropout, bool causal, const at::Tensor& seed, const at::Tensor& offset, std::optional<double> scale) {
  const auto tracked = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
  if (at::GradMode::is_enabled() && dropout == 0 &&
      (tracked(grad_output) || tracked(query) || tracked(key) || tracked(value) || tracked(bias))) {
    return differentiable_backward(grad_output, query, key, value, bias, causal,
                                   attention_scale(scale, query.size(-1)));
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return at::_ops::_scaled_dot_product_fused_attention_overrideable_backward::redispatch(
      keys & c10::after_autograd_keyset, grad_output, query, key, value, bias, needed, output, logsumexp, cum_q, cum_k,
      std::move(max_q), std::move(max_k), dropout, causal, seed, offset, scale);
}

// On a GPU dropout is PyTorch's flash kernel's.
AttentionOutputs own_or_flash_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const std::optional<at::Tensor>& bias, double dropout, bool causal,
                                        bool return_debug_mask, std::optional<double> scale) {
  const bool own = is_ours(query, key, value, bias.value_or(at::Tensor()), dropout, causal, true);
  return own ? own_attention(query, key, value, bias, dropout, causal, return_debug_mask, scale)
             : flash_attention(query, key, value, bias, dropout, causal, return_debug_mask, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> own_or_flash_attention_backward(
    const at::Tensor& grad_output, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, std::array<bool, 4> needed, const at::Tensor& output, const at::Tensor& logsumexp,
    const at::Tensor& cum_q, const at::Tensor& cum_k, int64_t max_q, int64_t max_k, double dropout, bool causal,
    const at::Tensor& seed, const at::Tensor& offset, std::optional<double> scale) {
  // Without dropout both forward passes leave the same things behind.
  const auto backward = dropout == 0 ? &own_attention_backward : &flash_attention_backward;
  return backward(grad_output, query, key, value, bias, needed, output, logsumexp, cum_q, cum_k, max_q, max_k, dropout,
                  causal, seed, offset, scale);
}

}  // namespace

void register_attention(torch::Library& library) {
  const char* forward = "_scaled_dot_product_fused_attention_overrideable";
  const char* backward = "_scaled_dot_product_fused_attention_overrideable_backward";
  if (substrate().is_cuda()) {
    own_kernel<&own_or_flash_attention>(library, forward);
    own_kernel<&own_or_flash_attention_backward>(library, backward);
  } else {
    own_kernel<&own_attention>(library, forward);
    own_kernel<&own_attention_backward>(library, backward);
  }
  permanent_library("aten", c10::DispatchKey::AutogradPrivateUse1)
      .impl(backward, TORCH_FN(own_attention_backward_autograd));
}

}  // namespace quartz

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &quartz::fused_sdp_choice)
}  // namespace at::native
