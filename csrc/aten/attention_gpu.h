// Attention on tensors in the memory of a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include "aten/attention_call.h"
#include "kernels/attention.h"
#include "kernels/write_kv.h"

namespace quartz {

#if QUARTZ_WITH_CUDA
// On the current stream of the GPU that holds `on`.
void run_gpu_attention(const kernels::Attention& a, const at::Tensor& on, const PagedCall& paged);
// The plan of a ragged call, an int32 tensor: `a` needs shapes, options and lengths only. Undefined where the kernel
// that serves the call needs none.
at::Tensor make_gpu_attention_plan(const kernels::Attention& a, const at::Tensor& on, int64_t most_queries);
void run_gpu_write_kv(const kernels::WriteKv& key, const kernels::WriteKv* value, int64_t blocks, const at::Tensor& on);
#endif

}  // namespace quartz
