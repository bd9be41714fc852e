// Attention on tensors in the memory of a GPU.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/attention.h"
#include "kernels/write_kv.h"

namespace quartz {

#if QUARTZ_WITH_CUDA
// On the current stream of the GPU that holds `on`. `blocks`: of a paged cache, else 0.
void run_gpu_attention(const kernels::Attention& a, const at::Tensor& on, int64_t blocks);
void run_gpu_write_kv(const kernels::WriteKv& key, const kernels::WriteKv* value, int64_t blocks, const at::Tensor& on);
#endif

}  // namespace quartz
