#include "kernels/cuda/quantized_format.cuh"

namespace quartz::kernels::cuda {

template void quantized_matmul_of<WeightFormat::kNvFp4>(const QuantizedMatmul&);
template void quantized_moe_of<WeightFormat::kNvFp4>(const QuantizedMoe&, const MoeProducts&);

}  // namespace quartz::kernels::cuda
