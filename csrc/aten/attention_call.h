// What the operators over kernels/attention.h share: arguments from tensors, and the call on the right processor.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/attention.h"

namespace quartz {

// The tensor itself if its last dimension is contiguous and, on a GPU, its rows are aligned; else a contiguous copy.
at::Tensor with_contiguous_rows(const at::Tensor& tensor);

// Strides of a tensor (batch, head, row, element).
kernels::AttentionStrides attention_strides(const at::Tensor& tensor);

// Puts `mask` into the arguments, broadcast to (batch, heads, queries, keys) of them. It must outlive the call.
void set_attention_mask(kernels::Attention& arguments, const at::Tensor& mask);

// A dense call on tensors (batch, heads, tokens, size) with contiguous rows, but for the options.
kernels::Attention dense_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const at::Tensor& out, double scale);

// What a paged call knows beyond its arguments.
struct PagedCall {
  int64_t blocks = 0;        // of the cache
  at::Tensor plan;           // of quartz::attention_plan, or undefined
  int64_t most_queries = 0;  // of one sequence; 0: not known
};
// Runs it where the memory of `on` is.
void run_attention(const char* op, const kernels::Attention& arguments, const at::Tensor& on,
                   const PagedCall& paged = {});

// What options of more than one operator must fulfil.
void check_attention_options(const char* op, std::optional<int64_t> window, std::optional<double> soft_cap,
                             const std::optional<at::Tensor>& sinks, int64_t heads);
// float32, contiguous; the tensor must outlive the call.
at::Tensor sinks_of(const std::optional<at::Tensor>& sinks);

double attention_scale(std::optional<double> scale, int64_t head_size);

}  // namespace quartz
