// aten::topk over the last dimension of float32, bfloat16 and float16 tensors (kernels/topk.h), and aten::sort, which
// is always stable: the order of equal elements is then their own, whatever algorithm the native device uses.
#include "kernels/topk.h"

#include "aten/rows.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/sort_ops.h>
#include <ATen/ops/topk_ops.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;
using PairOut = std::tuple<at::Tensor&, at::Tensor&>;

Pair stable_sort(const at::Tensor& self, std::optional<bool>, int64_t dim, bool descending) {
  auto [values, indices] = fallback_of_many<at::_ops::sort_stable, 2>(self, std::optional<bool>(true), dim, descending);
  return {values, indices};
}
PairOut stable_sort_out(const at::Tensor& self, std::optional<bool>, int64_t dim, bool descending, at::Tensor& values,
                        at::Tensor& indices) {
  fallback_of_many<at::_ops::sort_values_stable, 2>(self, std::optional<bool>(true), dim, descending, values, indices);
  return {values, indices};
}

bool serves(const at::Tensor& self, int64_t k, int64_t dim) {
  return has_kernel_dtype(self) && self.numel() > 0 && is_last_dim(self, dim) && k > 0 && k <= self.size(-1) &&
         self.size(-1) < (int64_t{1} << 32);
}

Pair run(const at::Tensor& self, int64_t k, bool largest) {
  const c10::DeviceGuard guard(self.device());
  if (on_gpu(self) && k > kernels::kTopKOnGpu) {
    auto [values, indices] = stable_sort(self, true, -1, largest);
    return {values.narrow(-1, 0, k).contiguous(), indices.narrow(-1, 0, k).contiguous()};
  }
  const auto rows = rows_of(self);
  c10::SmallVector<int64_t, 6> sizes(self.sizes().begin(), self.sizes().end());
  sizes.back() = k;
  auto values = empty_like_rows(self, sizes, self.scalar_type()), indices = empty_like_rows(self, sizes, at::kLong);
  kernels::TopK a{};
  a.x = rows.data();
  a.values = values.mutable_data_ptr();
  a.indices = indices.mutable_data_ptr<int64_t>();
  a.rows = rows.count;
  a.width = rows.width;
  a.x_stride = rows.stride;
  a.k = k;
  a.largest = largest;
  a.dtype = kernel_dtype(self);
  QUARTZ_RUN_KERNEL(topk, self, a);
  return {values, indices};
}

// `sorted` is a permission to leave the result unsorted, which nobody needs.
Pair topk(const at::Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted) {
  if (serves(self, k, dim)) return run(self, k, largest);
  auto [values, indices] = fallback_of_many<at::_ops::topk, 2>(self, k, dim, largest, sorted);
  return {values, indices};
}
PairOut topk_out(const at::Tensor& self, int64_t k, int64_t dim, bool largest, bool sorted, at::Tensor& values,
                 at::Tensor& indices) {
  if (serves(self, k, dim) && may_give_apart(self, values) && may_give_apart(self, indices) &&
      values.scalar_type() == self.scalar_type() && indices.scalar_type() == at::kLong) {
    const auto [found, places] = run(self, k, largest);
    give(found, values);
    give(places, indices);
  } else {
    fallback_of_many<at::_ops::topk_values, 2>(self, k, dim, largest, sorted, values, indices);
  }
  return {values, indices};
}

}  // namespace

QUARTZ_OPERATORS(topk) {
  operators.replace<&topk>("topk");
  operators.replace<&topk_out>("topk.values");
  operators.replace<&stable_sort>("sort.stable");
  operators.replace<&stable_sort_out>("sort.values_stable");
}

}  // namespace quartz
