// What the operators over rows share: how a tensor is walked row by row, and how results reach `out=` tensors.
#pragma once

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/empty.h>

#include "aten/operators.h"

namespace quartz {

// A tensor whose rows along the last dimension are contiguous and `stride` elements apart: itself, or a copy.
struct Rows {
  at::Tensor tensor;
  int64_t count, width, stride;

  const void* data() const { return tensor.const_data_ptr(); }
};

// `trailing` dimensions make up a row (one, or those of a layer norm). At least one element.
inline Rows rows_of(const at::Tensor& tensor, int64_t trailing = 1) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t leading = tensor.dim() - trailing;
  Rows rows{tensor, 1, 1, 0};
  bool fits = true;
  for (int64_t i = tensor.dim() - 1; i >= leading; --i) {
    fits = fits && (sizes[i] == 1 || strides[i] == rows.width);
    rows.width *= sizes[i];
  }
  for (int64_t i = leading - 1; i >= 0; --i) {
    if (sizes[i] == 1) continue;
    fits = fits && (rows.count == 1 || strides[i] == rows.stride * rows.count);
    if (rows.count == 1) rows.stride = strides[i];
    rows.count *= sizes[i];
  }
  if (fits) {
    if (rows.count == 1) rows.stride = rows.width;
    return rows;
  }
  rows.tensor = tensor.contiguous();
  rows.stride = rows.width;
  return rows;
}

inline at::Tensor empty_like_rows(const at::Tensor& like, at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::empty(sizes, like.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
}

// Whether `dim` names the last dimension of a tensor that has one.
inline bool is_last_dim(const at::Tensor& tensor, int64_t dim) {
  return tensor.dim() > 0 && (dim == -1 || dim == tensor.dim() - 1);
}
inline bool is_last_dim(const at::Tensor& tensor, at::OptionalIntArrayRef dim) {
  return dim && dim->size() == 1 && is_last_dim(tensor, dim->front());
}

// One dimension that is not the last, and so short that the copy which makes rows of it costs little: the kernels over
// rows serve it, too.
inline std::optional<int64_t> short_dim(const at::Tensor& tensor, at::OptionalIntArrayRef dim) {
  constexpr int64_t kShort = 1024;
  if (!dim || dim->size() != 1 || tensor.dim() == 0) return std::nullopt;
  const int64_t wrapped = dim->front() < 0 ? dim->front() + tensor.dim() : dim->front();
  if (wrapped < 0 || wrapped >= tensor.dim() || tensor.size(wrapped) > kShort) return std::nullopt;
  return wrapped;
}

// The shape of a reduction over the last dimension.
inline c10::SmallVector<int64_t, 6> reduced_sizes(const at::Tensor& tensor, bool keepdim) {
  c10::SmallVector<int64_t, 6> sizes(tensor.sizes().begin(), tensor.sizes().end() - 1);
  if (keepdim) sizes.push_back(1);
  return sizes;
}

// Whether an own kernel's result may be given to `out`. Where not, the native kernel refuses the call with PyTorch's
// message: `out` on another device.
inline bool may_give(const at::Tensor& self, const at::Tensor& out) { return out.device() == self.device(); }
// The same for operators whose native kernels refuse an `out` that overlaps a part of the input, too.
inline bool may_give_apart(const at::Tensor& self, const at::Tensor& out) {
  return may_give(self, out) && at::get_overlap_status(self, out) != at::MemOverlapStatus::Partial;
}

// As PyTorch's own out= variants: resized with a warning where the shape differs, then written.
inline at::Tensor& give(const at::Tensor& result, at::Tensor& out) {
  at::native::resize_output(out, result.sizes());
  out.copy_(result);
  return out;
}

}  // namespace quartz
