// quartz::apply_token_bitmask_; the rule in kernels/apply_token_bitmask_.h.
#include "kernels/apply_token_bitmask_.h"

#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::apply_token_bitmask_";

void apply_token_bitmask_(at::Tensor& logits, const at::Tensor& bitmask, const std::optional<at::Tensor>& row_indices) {
  const auto rows = row_indices.value_or(at::Tensor());
  check_same_device(kName, {{"logits", logits}, {"bitmask", bitmask}, {"row_indices", rows}});
  QUARTZ_CHECK_ARGUMENT(logits.dim() == 2, kName, "logits", "have the shape (rows, vocabulary)", logits.sizes());
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(logits), kName, "logits", "be float32, float16 or bfloat16",
                        logits.scalar_type());
  QUARTZ_CHECK_ARGUMENT(logits.size(1) <= 1 || logits.stride(1) == 1, kName, "logits",
                        "have contiguous rows, to be written in place", logits.strides());
  QUARTZ_CHECK_ARGUMENT(bitmask.scalar_type() == at::kInt, kName, "bitmask", "be int32", bitmask.scalar_type());
  const int64_t words = (logits.size(1) + 31) / 32;
  QUARTZ_CHECK_ARGUMENT(bitmask.dim() == 2 && bitmask.size(1) >= words, kName, "bitmask",
                        "have a row of ceil(vocabulary / 32) words or more", bitmask.sizes());
  const int64_t masks = bitmask.size(0);
  if (rows.defined()) {
    QUARTZ_CHECK_ARGUMENT(rows.dim() == 1 && rows.size(0) == masks && at::isIntegralType(rows.scalar_type(), false),
                          kName, "row_indices", "have one integer for each row of bitmask", rows.sizes());
  } else {
    QUARTZ_CHECK_ARGUMENT(masks == logits.size(0), kName, "bitmask", "have a row for each row of logits",
                          bitmask.sizes());
  }
  if (masks == 0 || logits.numel() == 0) return;
  const auto bits = bitmask.contiguous();
  const auto indices = rows.defined() ? rows.to(at::kLong).contiguous() : at::Tensor();
  const c10::DeviceGuard guard(logits.device());
  kernels::ApplyTokenBitmask a{};
  a.logits = logits.mutable_data_ptr();
  a.dtype = kernel_dtype(logits);
  a.rows = logits.size(0);
  a.vocabulary = logits.size(1);
  a.stride = logits.stride(0);
  a.bitmask = bits.const_data_ptr<int32_t>();
  if (indices.defined()) a.row_indices = indices.const_data_ptr<int64_t>();
  a.masks = masks;
  a.words = bits.size(1);
  QUARTZ_RUN_KERNEL(apply_token_bitmask_, logits, a);
}

}  // namespace

QUARTZ_OPERATORS(apply_token_bitmask_) {
  operators.define("apply_token_bitmask_(Tensor(a!) logits, Tensor bitmask, Tensor? row_indices=None) -> ()");
  operators.implement<&apply_token_bitmask_>("apply_token_bitmask_");
}

}  // namespace quartz
