#include "kernels/cuda/attention_kernel.cuh"

namespace quartz::kernels::cuda::attention_kernels {
template void launch<Float16, 256>(Kind, const Maps&, const Params&, int, bool, cudaStream_t);
}  // namespace quartz::kernels::cuda::attention_kernels
