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
unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, 65536));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    decode_weight_kernel(const QuantizedWeight w, int64_t count, int64_t n, int64_t k, T* out) {
  wait_for_previous_kernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step)
    out[i] = from_float<T>(decoded(w, i / k / n, i / k % n, i % k));
}

// 16 bytes of codes a thread.
template <class T, WeightFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    decode_units_kernel(const QuantizedWeight w, int64_t units, int64_t n, int units_of_row, uint4* out) {
  constexpr int kCodes = kUnit<kFormat>, kWords = kCodes / 2;
  wait_for_previous_kernel();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < units; i += step) {
    const int64_t stack_row = i / units_of_row, batch = stack_row / n, row = stack_row - batch * n;
    const int unit = static_cast<int>(i - stack_row * units_of_row), k = unit * kCodes;
    const uint4 codes =
        *reinterpret_cast<const uint4*>(w.codes + batch * w.codes_batch + row * w.codes_row + 16 * unit);
    const int64_t scales_row = batch * w.scales_batch + row / w.block_rows * w.scales_row;
    uint32_t scales = 0;
    if constexpr (kFormat == WeightFormat::kFp8) {
      if (w.scales != nullptr)
        scales =
            __float_as_uint(static_cast<const float*>(w.scales)[scales_row + k / static_cast<int>(w.block_columns)]);
    } else {
      const uint8_t* from = static_cast<const uint8_t*>(w.scales) + scales_row;
      if constexpr (kFormat == WeightFormat::kNvFp4)
        scales = from[k / 16] | static_cast<uint32_t>(from[k / 16 + 1]) << 8;
      else
        scales = from[k / 32];
    }
    uint32_t words[kWords];
    decode_unit<T, kFormat>(codes, scales, w.scales != nullptr, words);
    uint4* const to = out + i * (kWords / 4);
#pragma unroll
    for (int j = 0; j < kWords / 4; ++j)
      to[j] = make_uint4(words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
  }
}

template <class T, WeightFormat kFormat>
bool decode_units(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, T* out, void* stream) {
  constexpr int64_t kCodes = kUnit<kFormat>;
  const bool blocks = kFormat != WeightFormat::kFp8 || w.scales == nullptr || w.block_columns % kCodes == 0;
  if (!blocks || k % kCodes != 0 || k > INT_MAX || !aligned(w.codes, 16) || !aligned(out, 16) ||
      w.codes_row % 16 != 0 || w.codes_batch % 16 != 0)
    return false;
  const int64_t units = batch * n * (k / kCodes);
  launch(decode_units_kernel<T, kFormat>, {dim3(blocks_for(units)), kThreads, 0}, stream, w, units, n,
         static_cast<int>(k / kCodes), reinterpret_cast<uint4*>(out));
  return true;
}

template <class T>
void decode_as(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, void* to, void* stream) {
  T* const out = static_cast<T*>(to);
  if constexpr (sizeof(T) == 2) {
    if (w.format == WeightFormat::kFp8     ? decode_units<T, WeightFormat::kFp8>(w, batch, n, k, out, stream)
        : w.format == WeightFormat::kNvFp4 ? decode_units<T, WeightFormat::kNvFp4>(w, batch, n, k, out, stream)
                                           : decode_units<T, WeightFormat::kMxFp4>(w, batch, n, k, out, stream))
      return;
  }
  const int64_t count = batch * n * k;
  launch(decode_weight_kernel<T>, {dim3(blocks_for(count)), kThreads, 0}, stream, w, count, n, k, out);
}

// T: the type of bias and out, where those are not float.
template <class T>
__global__ void __launch_bounds__(kThreads) finish_kernel(const float* sums, const QuantizedWeight w,
                                                          const float* x_scales, const __grid_constant__ Product p) {
  wait_for_previous_kernel();
  const int64_t count = int64_t{p.m} * p.n, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const int64_t row = i / p.n, column = i % p.n;
    float v = sums[i];
    if (w.outer != nullptr) v = __fmul_rn(v, w.outer[column * w.outer_row]);
    if (x_scales != nullptr) v = __fmul_rn(v, x_scales[row]);
    Row<T, true>(p, 0, row).put(column, v);
  }
}

// The layer as the kernels for sorted rows take it: tiles of few or of many rows of an expert.
MoePlan plan_of(const MoeExperts& a, bool& few) {
  few = a.tokens * a.k <= 8 * a.experts || a.tokens <= kQuantizedFew;
  const int cap = few ? kQuantizedFew : kQuantizedMany;
  MoePlan plan{};
  plan.kind = MoePlan::Kind::kSorted;
  plan.caps = {cap, cap, 1};
  return plan;
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
  if (batch * n * k == 0) return;
  switch (dtype) {
    case DType::kFloat32:
      return decode_as<float>(w, batch, n, k, out, stream);
    case DType::kFloat16:
      return decode_as<Float16>(w, batch, n, k, out, stream);
    case DType::kBFloat16:
      return decode_as<BFloat16>(w, batch, n, k, out, stream);
  }
}

void finish_quantized(const QuantizedMatmul& a, const float* sums) {
  const Matmul& m = a.product;
  if (m.m == 0 || m.n == 0) return;
  const LaunchShape shape{dim3(blocks_for(m.m * m.n)), kThreads, 0};
  if (m.dtype == DType::kFloat16)
    launch(finish_kernel<Float16>, shape, m.stream, sums, a.w, a.x_scales, product_of(m));
  else
    launch(finish_kernel<BFloat16>, shape, m.stream, sums, a.w, a.x_scales, product_of(m));
}

int64_t quantized_moe_workspace(const QuantizedMoe& a) {
  const MoeExperts& layer = a.layer;
  const bool activation = layer.activation == GateActivation::kSilu || layer.activation == GateActivation::kGeluTanh ||
                          layer.activation == GateActivation::kRelu;
  const bool shapes = layer.hidden % 64 == 0 && layer.width % 64 == 0 && layer.hidden > 0 && layer.width > 0 &&
                      layer.experts > 0 && layer.experts <= kMaxMoeExperts && layer.k <= kMaxPairsOfToken &&
                      layer.tokens * layer.k < INT_MAX / 2;
  QuantizedOperand operand;
  if (layer.dtype == DType::kFloat32 || layer.transposed || !activation || !shapes || a.up.format != a.down.format ||
      a.up.format == WeightFormat::kPlain || !aligned(layer.x, 16) || layer.x_row % 8 != 0 ||
      !operand_of(a.up, layer.experts, 2 * layer.width, layer.hidden, operand) ||
      !operand_of(a.down, layer.experts, layer.hidden, layer.width, operand))
    return -1;
  bool few;
  MoePlan plan = plan_of(layer, few);
  return moe_workspace(layer, plan);
}

void quantized_moe(const QuantizedMoe& a) {
  const MoeExperts& layer = a.layer;
  if (layer.tokens == 0) return;
  MoeProducts products{};
  MoePlan plan = plan_of(layer, products.few);
  moe_workspace(layer, plan);
  products.x = plan.sorted_x;
  products.h = plan.h;
  products.up = moe_product_of(layer, plan, true);
  products.down = moe_product_of(layer, plan, false);
  products.pairs = plan.pairs;
  operand_of(a.up, layer.experts, 2 * layer.width, layer.hidden, products.up_w);
  operand_of(a.down, layer.experts, layer.hidden, layer.width, products.down_w);
  moe_order(layer, plan.tables, plan.caps);
  moe_gather(layer, plan);
  switch (a.up.format) {
    case WeightFormat::kFp8:
      quantized_moe_of<WeightFormat::kFp8>(a, products);
      break;
    case WeightFormat::kNvFp4:
      quantized_moe_of<WeightFormat::kNvFp4>(a, products);
      break;
    default:
      quantized_moe_of<WeightFormat::kMxFp4>(a, products);
      break;
  }
  moe_combine(layer, plan);
}

}  // namespace quartz::kernels::cuda
