// quartz::attention; formula and order of arithmetic in kernels/attention.h.
#include "kernels/attention.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <cmath>

#include "aten/attention_call.h"
#include "aten/attention_gpu.h"
#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"

namespace quartz {

namespace {

// The tile kernels of the GPU copy 16 bytes at a time. Which kernel serves a call must not depend on strides, since its
// bits would: what is not so is copied first.
bool needs_copy(const at::Tensor& tensor) {
  if (!on_gpu(tensor) || tensor.element_size() != 2 || tensor.size(-1) % 8 != 0) return false;
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 != 0) return true;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && (tensor.stride(i) <= 0 || tensor.stride(i) % 8 != 0)) return true;
  }
  return false;
}

}  // namespace

at::Tensor with_contiguous_rows(const at::Tensor& tensor) {
  if (tensor.stride(-1) != 1 && tensor.size(-1) != 1) return tensor.contiguous();
  return needs_copy(tensor) ? tensor.clone(at::MemoryFormat::Contiguous) : tensor;
}

kernels::AttentionStrides attention_strides(const at::Tensor& tensor) {
  return {tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

double attention_scale(std::optional<double> scale, int64_t head_size) {
  return scale.value_or(1. / std::sqrt(static_cast<double>(head_size)));
}

void set_attention_mask(kernels::Attention& a, const at::Tensor& mask) {
  using kernels::MaskKind;
  a.mask = mask.const_data_ptr();
  a.mask_kind = MaskKind::kVisible;
  if (mask.scalar_type() != at::kBool) {
    const auto dtype = kernel_dtype(mask);
    a.mask_kind = dtype == kernels::DType::kFloat32   ? MaskKind::kFloat32
                  : dtype == kernels::DType::kFloat16 ? MaskKind::kFloat16
                                                      : MaskKind::kBFloat16;
  }
  const int64_t dims = mask.dim();
  for (int64_t i = 0; i < 4; ++i) {  // counted from the last dimension
    a.mask_strides[3 - i] = i < dims && mask.size(dims - 1 - i) != 1 ? mask.stride(dims - 1 - i) : 0;
  }
}

kernels::Attention dense_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const at::Tensor& out, double scale) {
  kernels::Attention a{};
  a.dtype = kernel_dtype(query);
  a.batch = query.size(0);
  a.heads = query.size(1);
  a.kv_heads = key.size(1);
  a.queries = query.size(2);
  a.keys = key.size(2);
  a.head_size = query.size(3);
  a.value_size = value.size(3);
  a.q = query.const_data_ptr();
  a.k = key.const_data_ptr();
  a.v = value.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.q_strides = attention_strides(query);
  a.k_strides = attention_strides(key);
  a.v_strides = attention_strides(value);
  a.out_strides = attention_strides(out);
  a.scale = static_cast<float>(scale);
  return a;
}

void run_attention(const char* op, const kernels::Attention& arguments, const at::Tensor& on,
                   [[maybe_unused]] const PagedCall& paged) {
#if QUARTZ_WITH_CUDA
  if (on_gpu(on)) return run_gpu_attention(arguments, on, paged);
#endif
  TORCH_CHECK_NOT_IMPLEMENTED(!on_gpu(on), op, ": this build has no kernel for the memory of a GPU, got a tensor on ",
                              on.device());
  kernels::cpu::attention(arguments, at_parallel());
}

void check_attention_options(const char* op, std::optional<int64_t> window, std::optional<double> soft_cap,
                             const std::optional<at::Tensor>& sinks, int64_t heads) {
  if (window) QUARTZ_CHECK_ARGUMENT(*window >= 1, op, "window", "be at least 1", *window);
  if (soft_cap) QUARTZ_CHECK_ARGUMENT(*soft_cap > 0, op, "soft_cap", "be positive", *soft_cap);
  if (sinks && sinks->defined()) {
    QUARTZ_CHECK_ARGUMENT(sinks->dim() == 1 && sinks->size(0) == heads, op, "sinks", "have one element for each head",
                          sinks->sizes(), " and ", heads, " heads");
    QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(*sinks), op, "sinks", "be float32, float16 or bfloat16",
                          sinks->scalar_type());
  }
}

at::Tensor sinks_of(const std::optional<at::Tensor>& sinks) {
  return sinks && sinks->defined() ? sinks->to(at::kFloat).contiguous() : at::Tensor();
}

namespace {

void check_attention(const char* op, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const at::Tensor& mask) {
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(query), op, "query", "be float32, float16 or bfloat16", query.scalar_type());
  for (const auto& [name, tensor] : {NamedTensor{"query", query}, {"key", key}, {"value", value}}) {
    QUARTZ_CHECK_ARGUMENT(tensor.dim() == 4, op, name, "have the shape (batch, heads, tokens, size)", tensor.sizes());
    QUARTZ_CHECK_ARGUMENT(tensor.scalar_type() == query.scalar_type(), op, name, "have the dtype of query",
                          tensor.scalar_type());
    QUARTZ_CHECK_ARGUMENT(tensor.size(0) == query.size(0), op, name, "have the batch size of query", tensor.size(0),
                          " and ", query.size(0));
  }
  QUARTZ_CHECK_ARGUMENT(key.size(3) == query.size(3), op, "key", "have the head size of query", key.size(3), " and ",
                        query.size(3));
  QUARTZ_CHECK_ARGUMENT(value.size(1) == key.size(1) && value.size(2) == key.size(2), op, "value",
                        "have the heads and tokens of key", value.sizes(), " and ", key.sizes());
  QUARTZ_CHECK_ARGUMENT(key.size(1) > 0 ? query.size(1) % key.size(1) == 0 : query.size(1) == 0, op, "query",
                        "have a multiple of the heads of key", query.size(1), " and ", key.size(1));
  check_same_device(op, {{"query", query}, {"key", key}, {"value", value}, {"mask", mask}});
  if (mask.defined()) {
    QUARTZ_CHECK_ARGUMENT(mask.scalar_type() == at::kBool || has_kernel_dtype(mask), op, "mask",
                          "be bool, float32, float16 or bfloat16", mask.scalar_type());
    const int64_t whole[4] = {query.size(0), query.size(1), query.size(2), key.size(2)};
    bool fits = mask.dim() <= 4;
    for (int64_t i = 0; fits && i < mask.dim(); ++i) {
      const int64_t size = mask.size(mask.dim() - 1 - i);
      fits = size == 1 || size == whole[3 - i];
    }
    QUARTZ_CHECK_ARGUMENT(fits, op, "mask", "broadcast to (batch, heads, queries, keys)", mask.sizes(), " for ",
                          at::IntArrayRef(whole));
  }
}

// Checked and contiguous, or undefined.
at::Tensor key_bounds(const char* op, const char* name, const std::optional<at::Tensor>& bounds,
                      const at::Tensor& query) {
  if (!bounds || !bounds->defined()) return {};
  QUARTZ_CHECK_ARGUMENT(bounds->scalar_type() == at::kInt || bounds->scalar_type() == at::kLong, op, name,
                        "be int32 or int64", bounds->scalar_type());
  QUARTZ_CHECK_ARGUMENT(bounds->dim() == 1 && bounds->size(0) == query.size(0), op, name,
                        "have one element for each sequence of the batch", bounds->sizes(), " for ", query.size(0));
  check_same_device(op, {{"query", query}, {name, *bounds}});
  return bounds->contiguous();
}

std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const std::optional<at::Tensor>& mask_argument, bool causal,
                                             std::optional<double> scale, std::optional<int64_t> window,
                                             std::optional<double> soft_cap, const std::optional<at::Tensor>& sinks,
                                             std::optional<int64_t> query_offset,
                                             const std::optional<at::Tensor>& key_begin,
                                             const std::optional<at::Tensor>& key_end) {
  const char* op = "quartz::attention";
  const auto mask = mask_argument.value_or(at::Tensor());
  check_attention(op, query, key, value, mask);
  check_attention_options(op, window, soft_cap, sinks, query.size(1));
  if (sinks) check_same_device(op, {{"query", query}, {"sinks", *sinks}});
  const c10::DeviceGuard guard(query.device());
  // Tokens before heads in memory, so that the product behind it reads (batch, tokens, heads * size) without a copy.
  auto out = at::empty({query.size(0), query.size(2), query.size(1), value.size(3)},
                       query.options().memory_format(at::MemoryFormat::Contiguous))
                 .transpose(1, 2);
  auto logsumexp = at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(at::kFloat));
  const auto q = with_contiguous_rows(query), k = with_contiguous_rows(key), v = with_contiguous_rows(value);
  const auto sink_logits = sinks_of(sinks);
  auto arguments = dense_attention(q, k, v, out, attention_scale(scale, query.size(3)));
  arguments.logsumexp = logsumexp.mutable_data_ptr<float>();
  arguments.logsumexp_strides = attention_strides(logsumexp);
  arguments.causal = causal;
  arguments.window = window.value_or(0);
  arguments.soft_cap = static_cast<float>(soft_cap.value_or(0));
  arguments.query_offset = query_offset.value_or(key.size(2) - query.size(2));
  if (sink_logits.defined()) arguments.sinks = sink_logits.const_data_ptr<float>();
  if (mask.defined()) set_attention_mask(arguments, mask);
  const auto begin = key_bounds(op, "key_begin", key_begin, query), end = key_bounds(op, "key_end", key_end, query);
  if (begin.defined()) arguments.key_begin = {begin.const_data_ptr(), begin.scalar_type() == at::kLong};
  if (end.defined()) arguments.key_end = {end.const_data_ptr(), end.scalar_type() == at::kLong};
  run_attention(op, arguments, query);
  return {out, logsumexp};
}

}  // namespace

QUARTZ_OPERATORS(attention) {
  operators.define(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool causal=False, float? scale=None, "
      "int? window=None, float? soft_cap=None, Tensor? sinks=None, int? query_offset=None, Tensor? key_begin=None, "
      "Tensor? key_end=None) "
      "-> (Tensor, Tensor)");
  operators.implement<&attention>("attention");
}

}  // namespace quartz
