// What the files that call kernels share: element types, where a tensor's memory is, checks with one form of message.
#pragma once

#include <ATen/core/Tensor.h>

#include <initializer_list>
#include <string>

#include "aten/parallel.h"
#include "kernels/dtype.h"
#include "runtime/export.h"

namespace quartz {

// True for float32, float16 and bfloat16, the types of the kernels.
inline bool has_kernel_dtype(const at::Tensor& tensor) {
  const auto type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}
kernels::DType kernel_dtype(const at::Tensor& tensor);

// Whether the tensor's memory is a GPU's: a CUDA tensor, or a quartz tensor on the cuda substrate.
bool on_gpu(const at::Tensor& tensor);
// The stream that work on the tensor's GPU goes to now (a cudaStream_t).
void* current_gpu_stream(const at::Tensor& tensor);

// Runs kernels::cuda::KERNEL or kernels::cpu::KERNEL on the arguments, by the memory of the tensor WHERE.
#if QUARTZ_WITH_CUDA
#define QUARTZ_RUN_KERNEL(KERNEL, WHERE, ARGUMENTS)                  \
  do {                                                               \
    if (on_gpu(WHERE)) {                                             \
      kernels::cuda::KERNEL((ARGUMENTS), current_gpu_stream(WHERE)); \
    } else {                                                         \
      kernels::cpu::KERNEL((ARGUMENTS), at_parallel());              \
    }                                                                \
  } while (false)
#else
#define QUARTZ_RUN_KERNEL(KERNEL, WHERE, ARGUMENTS) kernels::cpu::KERNEL((ARGUMENTS), at_parallel())
#endif

// The tensor, or a contiguous copy where the elements of its last dimension do not lie side by side.
inline at::Tensor with_dense_rows(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

struct NamedTensor {
  const char* name;
  const at::Tensor& tensor;
};
// All defined ones must be on one device: "quartz::rms_norm: weight must be on the device of x, quartz:0, got cpu".
void check_same_device(const char* op, std::initializer_list<NamedTensor> tensors);

// The instruction set of the CPU kernels: "avx2", "avx512" or "avx512_bf16". What this processor lacks is not chosen.
QUARTZ_API std::string cpu_isa();
QUARTZ_API void limit_cpu_isa(const std::string& at_most);
// At load: RuntimeError on a processor without AVX2 and FMA; takes the limit of the environment.
void choose_cpu_isa();

// "quartz::rms_norm: <argument> must <rule>, got <value>", of type ValueError or RuntimeError as PyTorch's own are.
#define QUARTZ_CHECK_ARGUMENT(CONDITION, OP, ARGUMENT, RULE, ...) \
  TORCH_CHECK(CONDITION, OP, ": ", ARGUMENT, " must ", RULE, ", got ", __VA_ARGS__)

}  // namespace quartz
