// quartz::rotary and quartz::rotary_qk; formula, layouts and rounding in kernels/rotary.h.
#include "kernels/rotary.h"

#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

// How the caller's dimensions map to [batch, positions, heads, head size].
struct Axes {
  int64_t heads, positions;  // dimensions of x
};

Axes axes_of(const char* op, const char* name, const at::Tensor& x, int64_t heads_dim) {
  QUARTZ_CHECK_ARGUMENT(x.dim() == 3 || x.dim() == 4, op, name, "have 3 or 4 dimensions", x.dim());
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(x), op, name, "be float32, float16 or bfloat16", x.scalar_type());
  const int64_t heads = heads_dim < 0 ? heads_dim + x.dim() : heads_dim;
  QUARTZ_CHECK_ARGUMENT(heads == x.dim() - 3 || heads == x.dim() - 2, op, "heads_dim",
                        "be the second or third dimension from the end", heads_dim);
  return {heads, 2 * x.dim() - 5 - heads};
}

void check_table(const char* op, const char* name, const at::Tensor& table, const at::Tensor& x, int64_t batch,
                 int64_t positions) {
  QUARTZ_CHECK_ARGUMENT(table.dim() == 2 || table.dim() == 3, op, name, "have 2 or 3 dimensions", table.dim());
  const bool fits = table.size(-2) == positions && (table.dim() == 2 || table.size(0) == 1 || table.size(0) == batch);
  QUARTZ_CHECK_ARGUMENT(fits, op, name, "have shape (positions, n), (1, positions, n) or (batch, positions, n)",
                        table.sizes(), " for ", batch, " x ", positions, " positions");
  QUARTZ_CHECK_ARGUMENT(table.scalar_type() == x.scalar_type() || table.scalar_type() == at::kFloat, op, name,
                        "have the dtype of the rotated tensor or float32", table.scalar_type());
}

// Rotates one or two tensors; results have the strides that empty_like gives them.
void run(const char* op, std::initializer_list<NamedTensor> inputs, const at::Tensor& cos, const at::Tensor& sin,
         c10::string_view style, bool pair_table, int64_t heads_dim, bool inverse, at::Tensor* results) {
  const auto& first = inputs.begin()->tensor;
  const Axes axes = axes_of(op, inputs.begin()->name, first, heads_dim);
  const int64_t batch = first.dim() == 4 ? first.size(0) : 1, positions = first.size(axes.positions);
  check_same_device(op, {*inputs.begin(), *(inputs.end() - 1), {"cos", cos}, {"sin", sin}});
  check_table(op, "cos", cos, first, batch, positions);
  check_table(op, "sin", sin, first, batch, positions);
  QUARTZ_CHECK_ARGUMENT(sin.scalar_type() == cos.scalar_type() && sin.size(-1) == cos.size(-1), op, "sin",
                        "have the dtype and width of cos", sin.scalar_type(), " ", sin.sizes());
  const bool interleaved = style == "interleaved", deinterleaved = style == "deinterleaved";
  TORCH_CHECK_VALUE(interleaved || deinterleaved || style == "half", op,
                    ": style must be one of half, interleaved and deinterleaved, got ", style);
  kernels::Rotary a{};
  a.batch = batch;
  a.positions = positions;
  a.head_size = first.size(-1);
  a.rotated = pair_table ? 2 * cos.size(-1) : cos.size(-1);
  QUARTZ_CHECK_ARGUMENT(a.rotated <= a.head_size && a.rotated % 2 == 0, op, "the rotated part",
                        "be even and at most the size of a head", a.rotated, " of ", a.head_size);
  a.in_interleaved = interleaved || (deinterleaved && !inverse);
  a.out_interleaved = interleaved || (deinterleaved && inverse);
  a.table_half = pair_table;
  a.table_interleaved = interleaved && !pair_table;
  a.inverse = inverse;
  a.dtype = kernel_dtype(first);
  a.table_dtype = kernel_dtype(cos);

  const c10::DeviceGuard guard(first.device());
  const auto cosines = with_dense_rows(cos), sines = with_dense_rows(sin);
  const auto take = [&](const at::Tensor& table, const void*& data, int64_t(&stride)[2]) {
    data = table.const_data_ptr();
    stride[0] = table.dim() == 3 && table.size(0) > 1 ? table.stride(0) : 0;
    stride[1] = table.stride(-2);
  };
  take(cosines, a.cos, a.cos_stride);
  take(sines, a.sin, a.sin_stride);
  std::array<at::Tensor, 2> kept;  // copies live as long as the call
  int count = 0;
  for (const auto& [name, x] : inputs) {
    axes_of(op, name, x, heads_dim);
    QUARTZ_CHECK_ARGUMENT(x.dim() == first.dim() && x.size(-1) == a.head_size && x.size(axes.positions) == positions &&
                              (x.dim() == 3 || x.size(0) == batch),
                          op, name, "have batch, positions and head size of the first tensor", x.sizes());
    QUARTZ_CHECK_ARGUMENT(x.scalar_type() == first.scalar_type(), op, name, "have the dtype of the first tensor",
                          x.scalar_type());
    const auto& from = kept[count] = with_dense_rows(x);
    auto& to = results[count] = at::empty_like(from);
    auto& tensor = a.tensors[count++];
    if (to.stride(-1) != 1 && to.size(-1) != 1) to = at::empty_like(from, at::MemoryFormat::Contiguous);
    if (x.numel() == 0) continue;
    tensor.x = from.const_data_ptr();
    tensor.y = to.mutable_data_ptr();
    tensor.heads = x.size(axes.heads);
    const auto strides = [&](const at::Tensor& t, int64_t(&out)[3]) {
      out[0] = t.dim() == 4 ? t.stride(0) : 0;
      out[1] = t.stride(axes.positions);
      out[2] = t.stride(axes.heads);
    };
    strides(from, tensor.x_stride);
    strides(to, tensor.y_stride);
  }
  if (a.tensors[0].x == nullptr && a.tensors[1].x == nullptr) return;
  QUARTZ_RUN_KERNEL(rotary, first, a);
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, c10::string_view style,
                  bool pair_table, int64_t heads_dim, bool inverse) {
  at::Tensor y;
  run("quartz::rotary", {{"x", x}}, cos, sin, style, pair_table, heads_dim, inverse, &y);
  return y;
}

std::tuple<at::Tensor, at::Tensor> rotary_qk(const at::Tensor& q, const at::Tensor& k, const at::Tensor& cos,
                                             const at::Tensor& sin, c10::string_view style, bool pair_table,
                                             int64_t heads_dim, bool inverse) {
  at::Tensor y[2];
  run("quartz::rotary_qk", {{"q", q}, {"k", k}}, cos, sin, style, pair_table, heads_dim, inverse, y);
  return {y[0], y[1]};
}

}  // namespace

QUARTZ_OPERATORS(rotary) {
  operators.define(
      "rotary(Tensor x, Tensor cos, Tensor sin, *, str style=\"half\", bool pair_table=False, int heads_dim=-3, "
      "bool inverse=False) -> Tensor");
  operators.implement<&rotary>("rotary");
  operators.define(
      "rotary_qk(Tensor q, Tensor k, Tensor cos, Tensor sin, *, str style=\"half\", bool pair_table=False, "
      "int heads_dim=-3, bool inverse=False) -> (Tensor, Tensor)");
  operators.implement<&rotary_qk>("rotary_qk");
}

}  // namespace quartz
