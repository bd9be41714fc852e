// Which products with quantised weights the kernels serve, the decoded copy for the others, and the experts layer:
// order -> gather -> first product with the gate -> second product -> combine, as in moe_experts.cu.
#include <climits>

#include "kernels/cuda/moe_kernels.h"
#include "kernels/cuda/quantized_kernels.h"

namespace quartz::kernels::cuda {
namespace {

bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

// The exponent of a power of two of at most 2^30; -1 for another number.
int bits_of(int64_t size) {
  if (size <= 0 || (size & (size - 1)) != 0 || size > (int64_t{1} << 30)) return -1;
  return __builtin_ctzll(static_cast<uint64_t>(size));
}

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) decode_weight_kernel(const QuantizedWeight w, int64_t count, int64_t n, int64_t k,
                                                          T* out) {
  wait_for_previous_kernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    out[i] = from_float<T>(decoded(w, i / k / n, i / k % n, i % k));
}

}  // namespace

bool operand_of(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, QuantizedOperand& operand) {
  operand = {};
  operand.w = w;
  operand.k = static_cast<int>(k);
  if (k % 64 != 0 || k == 0 || k > INT_MAX / 2 || n > INT_MAX / 2) return false;
  if (!aligned(w.codes, 16) || w.codes_row % 16 != 0 || w.codes_batch % 16 != 0) return false;
  if (w.scales == nullptr) return w.format == WeightFormat::kFp8;
  if (!aligned(w.scales, 4)) return false;
  const int64_t blocks = (k + w.block_columns - 1) / w.block_columns;
  operand.scales_end = static_cast<const uint8_t*>(w.scales) + (batch - 1) * w.scales_batch +
                       ((n + w.block_rows - 1) / w.block_rows - 1) * w.scales_row + blocks;  // of bytes
  if (w.format == WeightFormat::kNvFp4) return w.scales_row % 4 == 0 && w.scales_batch % 4 == 0;
  if (w.format == WeightFormat::kMxFp4) return w.scales_row >= 0 && w.scales_batch >= 0;
  operand.block_row_bits = bits_of(w.block_rows);
  operand.block_column_bits = bits_of(w.block_columns);
  return operand.block_row_bits >= 0 && operand.block_column_bits >= 4;
}

bool quantized_matmul(const QuantizedMatmul& a) {
  const Matmul& m = a.product;
  QuantizedOperand operand;
  if (m.dtype == DType::kFloat32 || m.batch != 1 || m.m > INT_MAX / 2) return false;
  if (m.m == 0 || m.n == 0) return true;
  if (m.x_k != 1 || m.x_row % 8 != 0 || (m.m > 1 && m.x_row <= 0) || !aligned(m.x, 16)) return false;
  if (!operand_of(a.w, 1, m.n, m.k, operand)) return false;
  QuantizedMatmul call = a;
  if (m.m == 1) call.product.x_row = m.k;
  switch (a.w.format) {
    case WeightFormat::kFp8:
      quantized_matmul_of<WeightFormat::kFp8>(call);
      return true;
    case WeightFormat::kNvFp4:
      quantized_matmul_of<WeightFormat::kNvFp4>(call);
      return true;
    case WeightFormat::kMxFp4:
      quantized_matmul_of<WeightFormat::kMxFp4>(call);
      return true;
    default:
      return false;
  }
}

void decode_weight(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, DType dtype, void* out,
                   void* stream) {
  const int64_t count = batch * n * k;
  if (count == 0) return;
  const LaunchShape shape{dim3(static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 65536))),
                          kThreads, 0};
  switch (dtype) {
    case DType::kFloat32:
      return launch(decode_weight_kernel<float>, shape, stream, w, count, n, k, static_cast<float*>(out));
    case DType::kFloat16:
      return launch(decode_weight_kernel<Float16>, shape, stream, w, count, n, k, static_cast<Float16*>(out));
    case DType::kBFloat16:
      return launch(decode_weight_kernel<BFloat16>, shape, stream, w, count, n, k, static_cast<BFloat16*>(out));
  }
}

}  // namespace quartz::kernels::cuda
