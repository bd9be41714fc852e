// quartz::moe_experts: order, gather, grouped product, gate, grouped product, combine. The steps and their arithmetic
// are in kernels/moe_experts.h and kernels/matmul.h.
#include "aten/moe_experts.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <limits>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"

namespace quartz {
namespace {

constexpr const char* kOp = "quartz::moe_experts";
// Pairs that go through the products together: bounds the memory of the float intermediate. Rows are independent, so
// where the cut falls changes no bit.
constexpr int64_t kPairsAtOnce = int64_t{1} << 14;

kernels::GateActivation activation_of(const char* op, c10::string_view name) {
  using kernels::GateActivation;
  if (name == "silu") return GateActivation::kSilu;
  if (name == "gelu") return GateActivation::kGelu;
  if (name == "gelu_tanh") return GateActivation::kGeluTanh;
  if (name == "relu") return GateActivation::kRelu;
  if (name == "relu_squared") return GateActivation::kReluSquared;
  TORCH_CHECK_VALUE(false, op, ": activation must be 'silu', 'gelu', 'gelu_tanh', 'relu' or 'relu_squared', got '",
                    name, "'");
}

// rows x w[e]^T + bias[e] for the rows of each expert.
kernels::Matmul grouped(const at::Tensor& rows, const ExpertWeights& w, const at::Tensor& out, const at::Tensor& ends) {
  kernels::Matmul a{};
  a.x = rows.const_data_ptr();
  a.x_strides = {0, rows.stride(0), 1};
  a.w = w.w;
  a.w_strides = w.strides;
  a.quantized = w.quantized;
  if (w.bias.defined()) {
    a.bias = w.bias.const_data_ptr();
    a.bias_strides = {w.bias.stride(0), 0, w.bias.stride(1)};
  }
  a.out = out.mutable_data_ptr();
  a.out_strides = {0, out.stride(0), 1};
  a.batch = ends.size(0);
  a.n = out.size(1);
  a.k = rows.size(1);
  a.alpha = a.beta = 1.0f;
  a.activation = kernels::Activation::kNone;
  a.dtype = kernel_dtype(rows);
  a.out_dtype = kernel_dtype(out);
  a.ragged = kernels::Ragged::kM;
  a.offsets = ends.const_data_ptr<int32_t>();
  return a;
}

void run_on_cpu(const MoeLayer& layer, const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                const ExpertWeights& up, const ExpertWeights& down, const MoeGateOptions& gate, const at::Tensor& y) {
  // Scratch is native memory of the thread: it never leaves this function.
  const auto ints = at::TensorOptions(at::kCPU).dtype(at::kInt), native = at::TensorOptions(at::kCPU).dtype(x.dtype());
  const int64_t count = layer.tokens * layer.k;
  const auto pairs = at::empty({count}, ints), row_of = at::empty({count}, ints),
             ends = at::empty({layer.experts}, ints);
  kernels::moe_order({ids.const_data_ptr<int64_t>(), count, layer.experts, pairs.mutable_data_ptr<int32_t>(),
                      row_of.mutable_data_ptr<int32_t>(), ends.mutable_data_ptr<int32_t>()});
  const int64_t rows = layer.experts == 0 ? 0 : ends.const_data_ptr<int32_t>()[layer.experts - 1];
  const auto parallel = at_parallel();
  const auto gathered = at::empty({rows, layer.hidden}, native), h = at::empty({rows, layer.width}, native);
  const auto projected = at::empty({rows, layer.projected}, native.dtype(at::kFloat));
  const auto out = at::empty({rows, layer.hidden}, native);
  if (rows != 0) {
    kernels::cpu::moe_gather({x.const_data_ptr(), pairs.const_data_ptr<int32_t>(), gathered.mutable_data_ptr(), rows,
                              layer.k, layer.hidden, x.stride(0), x.element_size()},
                             parallel);
    kernels::cpu::matmul(grouped(gathered, up, projected, ends), parallel);
    kernels::cpu::moe_gate({projected.const_data_ptr<float>(), h.mutable_data_ptr(), rows, layer.width, gate.gated,
                            gate.interleaved, gate.activation, gate.alpha, gate.limit, gate.up_offset, kernel_dtype(x)},
                           parallel);
    kernels::cpu::matmul(grouped(h, down, out, ends), parallel);
  }
  kernels::cpu::moe_combine(
      {out.const_data_ptr(), ids.const_data_ptr<int64_t>(), row_of.const_data_ptr<int32_t>(),
       weights.const_data_ptr<float>(), y.mutable_data_ptr(), layer.tokens, layer.k, layer.hidden, kernel_dtype(x)},
      parallel);
}

at::Tensor moe_experts(const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights, const at::Tensor& up,
                       const at::Tensor& down, const std::optional<at::Tensor>& up_bias,
                       const std::optional<at::Tensor>& down_bias, c10::string_view activation, bool gated,
                       bool interleaved, bool transposed, double alpha, std::optional<double> limit, double up_offset) {
  const auto first_bias = up_bias.value_or(at::Tensor()), second_bias = down_bias.value_or(at::Tensor());
  const int64_t out = transposed ? 2 : 1, in = transposed ? 1 : 2;
  const MoeLayer layer = check_moe_layer(kOp, x, ids, weights, up, down, first_bias, second_bias, out, gated);
  QUARTZ_CHECK_ARGUMENT(up.size(in) == layer.hidden, kOp, "up", "take the hidden size of x", up.size(in), " for ",
                        layer.hidden);
  check_moe_down(kOp, layer, down.size(0), down.size(in), down.size(out), up, down);
  for (const auto* tensor : {&up, &down}) {
    QUARTZ_CHECK_ARGUMENT(tensor->scalar_type() == x.scalar_type(), kOp, "up, down and their biases",
                          "have the dtype of x", tensor->scalar_type(), " for ", x.scalar_type());
  }
  const MoeGateOptions gate =
      moe_gate_options(kOp, activation, gated, interleaved, transposed, alpha, limit, up_offset);
  const c10::DeviceGuard guard(x.device());
  auto y = at::empty({layer.tokens, layer.hidden}, x.options());
  if (y.numel() == 0) return y;
#if QUARTZ_WITH_CUDA
  if (on_gpu(x)) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        moe_experts_on_gpu(x, ids, weights, up, down, first_bias, second_bias, gate, y), kOp,
        ": on a GPU, float16 or bfloat16, gated by silu, gelu_tanh or relu, sizes that are multiples of 64 and "
        "contiguous weights, aligned to 16 bytes (alternating gates exactly if transposed), are served; use "
        "Transformers' grouped_mm experts");
    return y;
  }
#endif
  const auto plain = [&](const at::Tensor& w, const at::Tensor& bias) {
    return ExpertWeights{w.const_data_ptr(), {w.stride(0), w.stride(out), w.stride(in)}, {}, bias};
  };
  moe_experts_on_cpu(layer, x, ids, weights, plain(up, first_bias), plain(down, second_bias), gate, y);
  return y;
}

}  // namespace

MoeLayer check_moe_layer(const char* op, const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                         const at::Tensor& up, const at::Tensor& down, const at::Tensor& up_bias,
                         const at::Tensor& down_bias, int64_t rows, bool gated) {
  check_same_device(op, {{"x", x}, {"up", up}, {"down", down}});
  QUARTZ_CHECK_ARGUMENT(up.dim() == 3 && down.dim() == 3, op, "up and down", "have three dimensions", up.sizes(),
                        " and ", down.sizes());
  check_same_device(op, {{"x", x}, {"ids", ids}, {"weights", weights}, {"up_bias", up_bias}, {"down_bias", down_bias}});
  const int64_t experts = up.size(0), projected = up.size(rows);
  QUARTZ_CHECK_ARGUMENT(x.dim() == 2, op, "x", "have shape [tokens, hidden]", x.sizes());
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(x), op, "x", "be float32, float16 or bfloat16", x.scalar_type());
  MoeLayer layer{};
  layer.tokens = x.size(0);
  layer.hidden = x.size(1);
  QUARTZ_CHECK_ARGUMENT(ids.dim() == 2 && ids.size(0) == layer.tokens, op, "ids", "have shape [tokens, k]",
                        ids.sizes());
  layer.k = ids.size(1);
  QUARTZ_CHECK_ARGUMENT(layer.k >= 1 && layer.k <= kernels::kMaxPairsOfToken, op, "ids", "have 1 to 64 columns",
                        layer.k);
  QUARTZ_CHECK_ARGUMENT(ids.scalar_type() == at::kLong || ids.scalar_type() == at::kInt, op, "ids", "be int64 or int32",
                        ids.scalar_type());
  QUARTZ_CHECK_ARGUMENT(weights.sizes() == ids.sizes(), op, "weights", "have the shape of ids", weights.sizes());
  QUARTZ_CHECK_ARGUMENT(weights.is_floating_point(), op, "weights", "be floating point", weights.scalar_type());
  layer.experts = experts;
  layer.projected = projected;
  layer.width = gated ? projected / 2 : projected;
  QUARTZ_CHECK_ARGUMENT(!gated || projected % 2 == 0, op, "up", "have an even number of rows (gate and up)", projected);
  for (const auto* tensor : {&up_bias, &down_bias}) {
    QUARTZ_CHECK_ARGUMENT(!tensor->defined() || tensor->scalar_type() == x.scalar_type(), op,
                          "up, down and their biases", "have the dtype of x", tensor->scalar_type(), " for ",
                          x.scalar_type());
  }
  QUARTZ_CHECK_ARGUMENT(
      !up_bias.defined() || (up_bias.dim() == 2 && up_bias.size(0) == experts && up_bias.size(1) == projected), op,
      "up_bias", "have shape [experts, rows of up]", up_bias.sizes());
  QUARTZ_CHECK_ARGUMENT(!down_bias.defined() ||
                            (down_bias.dim() == 2 && down_bias.size(0) == experts && down_bias.size(1) == layer.hidden),
                        op, "down_bias", "have shape [experts, hidden]", down_bias.sizes());
  return layer;
}

void check_moe_down(const char* op, const MoeLayer& layer, int64_t experts, int64_t width, int64_t hidden,
                    const at::Tensor& up, const at::Tensor& down) {
  QUARTZ_CHECK_ARGUMENT(experts == layer.experts && width == layer.width && hidden == layer.hidden, op, "down",
                        "fit the experts, width and hidden size of up", down.sizes(), " for ", up.sizes());
}

MoeGateOptions moe_gate_options(const char* op, c10::string_view activation, bool gated, bool interleaved,
                                bool transposed, double alpha, std::optional<double> limit, double up_offset) {
  return {activation_of(op, activation),
          gated,
          interleaved,
          transposed,
          static_cast<float>(alpha),
          static_cast<float>(limit.value_or(std::numeric_limits<double>::infinity())),
          static_cast<float>(up_offset)};
}

void moe_experts_on_cpu(const MoeLayer& layer, const at::Tensor& x, const at::Tensor& ids, const at::Tensor& weights,
                        const ExpertWeights& up, const ExpertWeights& down, const MoeGateOptions& gate,
                        const at::Tensor& y) {
  const auto dense = with_dense_rows(x);
  const auto long_ids = ids.to(at::kLong).contiguous(), float_weights = weights.to(at::kFloat).contiguous();
  const int64_t at_once = std::max<int64_t>(1, kPairsAtOnce / layer.k);
  for (int64_t begin = 0; begin < layer.tokens; begin += at_once) {
    MoeLayer part = layer;
    part.tokens = std::min(at_once, layer.tokens - begin);
    const auto cut = [&](const at::Tensor& tensor) { return tensor.narrow(0, begin, part.tokens); };
    run_on_cpu(part, cut(dense), cut(long_ids), cut(float_weights), up, down, gate, cut(y));
  }
}

QUARTZ_OPERATORS(moe_experts) {
  operators.define(
      "moe_experts(Tensor x, Tensor ids, Tensor weights, Tensor up, Tensor down, Tensor? up_bias=None, "
      "Tensor? down_bias=None, str activation='silu', bool gated=True, bool interleaved=False, bool transposed=False, "
      "float alpha=1., float? limit=None, float up_offset=0.) -> Tensor");
  operators.implement<&moe_experts>("moe_experts");
}

}  // namespace quartz
