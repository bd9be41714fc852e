// _grouped_mm: one product a group (an expert), the groups cut out of one dimension by `offs`.
// The bits of a row are those of mm with the same operands (kernels/matmul.h).
#include "aten/alias.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/_grouped_mm_ops.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/matmul_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"

namespace quartz {
namespace {

bool served(const at::Tensor& self, const at::Tensor& mat2, const std::optional<at::Tensor>& offs,
            const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> out_dtype) {
  if (!multipliable({self, mat2}) || !fit_groups(self, mat2) || (bias && bias->defined())) return false;
  if (out_dtype && *out_dtype != self.scalar_type()) return false;
  if (self.dim() < 2 || self.dim() > 3 || mat2.dim() < 2 || mat2.dim() > 3) return false;
  const bool any_flat = self.dim() == 2 || mat2.dim() == 2, has_offs = offs && offs->defined();
  if (any_flat != has_offs || self.size(-1) != mat2.size(-2)) return false;
  if (has_offs) {
    if (!is_quartz(*offs) || offs->device() != self.device() || offs->scalar_type() != at::kInt || offs->dim() != 1) {
      return false;
    }
    if ((self.dim() == 3 && self.size(0) != offs->size(0)) || (mat2.dim() == 3 && mat2.size(0) != offs->size(0))) {
      return false;
    }
  }
  return self.dim() == 2 || mat2.dim() == 2 || self.size(0) == mat2.size(0);
}

// As the native operator allocates it: rows padded to 16 bytes.
at::Tensor padded(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const int64_t unit = 16 / static_cast<int64_t>(options.dtype().itemsize());
  const int64_t row = (sizes.back() + unit - 1) / unit * unit;
  if (sizes.size() == 2) return at::empty_strided(sizes, {row, 1}, options);
  return at::empty_strided(sizes, {sizes[1] * row, row, 1}, options);
}

at::Tensor grouped_mm(const at::Tensor& self, const at::Tensor& mat2, const std::optional<at::Tensor>& offs,
                      const std::optional<at::Tensor>& bias, std::optional<at::ScalarType> out_dtype) {
  if (!served(self, mat2, offs, bias, out_dtype)) {
    return fallback_of<at::_ops::_grouped_mm>(self, mat2, offs, bias, out_dtype);
  }
  constexpr auto op = "_grouped_mm";
  const c10::DeviceGuard guard(self.device());
  const bool flat_x = self.dim() == 2, flat_y = mat2.dim() == 2;
  const int64_t groups = flat_x && flat_y ? offs->size(0) : (flat_x ? mat2.size(0) : self.size(0));
  const int64_t m = self.size(-2), n = mat2.size(-1);
  const auto out = flat_x == flat_y ? padded({groups, m, n}, self.options()) : padded({m, n}, self.options());
  if (!flat_x && !flat_y) {
    multiply(self, mat2, out, {});
    return out;
  }

  const auto ends = offs->contiguous();
  const auto* end = ends.const_data_ptr<int32_t>();
  if (!on_gpu(self)) {  // a GPU would have to be waited for
    const int64_t whole = flat_x && flat_y ? self.size(1) : (flat_x ? m : n);
    for (int64_t g = 0; g < groups; ++g) {
      QUARTZ_CHECK_ARGUMENT(end[g] >= (g == 0 ? 0 : end[g - 1]) && end[g] <= whole, op, "offs",
                            c10::str("ascend from 0 to at most ", whole), end[g], " for group ", g);
    }
    const int64_t covered = groups == 0 ? 0 : end[groups - 1];
    // What belongs to no group is 0, not what the memory held.
    if (flat_x != flat_y && covered < whole) out.narrow(flat_x ? 0 : 1, covered, whole - covered).zero_();
  }
  if (groups == 0) return out.zero_();
  if (out.numel() == 0) return out;

  kernels::Matmul a{};
  a.x = self.const_data_ptr();
  a.w = mat2.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.x_strides = matrix_strides(self);
  a.w_strides = matrix_strides(mat2);
  std::swap(a.w_strides.row, a.w_strides.column);
  a.out_strides = matrix_strides(out);
  a.batch = groups;
  a.m = m;
  a.n = n;
  a.k = self.size(-1);
  a.alpha = a.beta = 1;
  a.dtype = a.out_dtype = kernel_dtype(self);
  a.ragged = flat_x && flat_y ? kernels::Ragged::kK : (flat_x ? kernels::Ragged::kM : kernels::Ragged::kN);
  a.offsets = end;
  multiply_groups(a, out);
  return out;
}

}  // namespace

QUARTZ_OPERATORS(grouped_mm) {
  if (c10::Dispatcher::singleton().findSchema({"aten::_grouped_mm", ""})) {
    operators.replace<&grouped_mm>("_grouped_mm");
  }
}

}  // namespace quartz
