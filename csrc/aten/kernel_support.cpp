#include "aten/kernel_support.h"

#include "kernels/isa.h"
#include "runtime/environment.h"
#include "runtime/substrate.h"

#if QUARTZ_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace quartz {

kernels::DType kernel_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::DType::kFloat32;
    case at::kHalf:
      return kernels::DType::kFloat16;
    case at::kBFloat16:
      return kernels::DType::kBFloat16;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, "quartz kernels compute in float32, float16 and bfloat16, got ",
                                  tensor.scalar_type());
  }
}

bool on_gpu(const at::Tensor& tensor) {
  return tensor.is_cuda() || (tensor.device().type() == kQuartz && substrate().is_cuda());
}

void* current_gpu_stream([[maybe_unused]] const at::Tensor& tensor) {
#if QUARTZ_WITH_CUDA
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
#else
  return nullptr;
#endif
}

void check_same_device(const char* op, std::initializer_list<NamedTensor> tensors) {
  const NamedTensor* first = nullptr;
  for (const auto& named : tensors) {
    if (!named.tensor.defined()) continue;
    if (first == nullptr) {
      first = &named;
      continue;
    }
    TORCH_CHECK(named.tensor.device() == first->tensor.device(), op, ": ", named.name, " must be on the device of ",
                first->name, ", ", first->tensor.device(), ", got ", named.tensor.device());
  }
}

std::string cpu_isa() { return kernels::name_of(kernels::isa()); }

void limit_cpu_isa(const std::string& at_most) {
  using kernels::Isa;
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16}) {
    if (at_most == kernels::name_of(isa)) return kernels::limit_isa(isa);
  }
  TORCH_CHECK_VALUE(false, "quartz: the instruction set must be 'avx2', 'avx512' or 'avx512_bf16', got '", at_most,
                    "'");
}

void choose_cpu_isa() {
  kernels::Isa isa;
  TORCH_CHECK(kernels::detect_isa(&isa), "quartz: this processor has no AVX2 and FMA, which torch-quartz needs");
  if (environment().cpu_isa) limit_cpu_isa(*environment().cpu_isa);
}

}  // namespace quartz
