// mm, addmm, bmm, baddbmm, addmv and dot of quartz tensors in float32, float16 and bfloat16: own kernels whose bits are
// a function of the row and of k alone (kernels/matmul.h). Everything else, and every error, is the native operator's.
// mv, matmul, einsum and the like are composed of these by PyTorch; linear is in linear.cpp.
#include "aten/alias.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ExpandUtils.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/addmv_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/dot_ops.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm_ops.h>
#include <c10/core/DeviceGuard.h>

#include "aten/matmul_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

// The bytes from the first to behind the last element.
std::pair<const char*, const char*> extent(const at::Tensor& tensor) {
  int64_t last = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + last * static_cast<int64_t>(tensor.element_size())};
}

bool may_overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto x = extent(a), y = extent(b);
  return x.first < y.second && y.first < x.second;
}

bool same_view(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.const_data_ptr() == b.const_data_ptr();
}

bool repeats_elements(const at::Tensor& tensor) {  // the native operator refuses to write to it
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) == 0 && tensor.size(i) > 1) return true;
  }
  return false;
}

bool real(const at::Scalar& value) { return value.isFloatingPoint() || value.isIntegral(true); }

// One product of PyTorch's: x of [m, k] or [b, m, k], y of [k, n] or [b, k, n], and what is added, of any shape that
// expands to the result's.
struct Product {
  const at::Tensor &x, &y;
  at::Tensor addend;
  at::Scalar alpha = 1, beta = 1;

  at::DimVector sizes() const {
    at::DimVector result(x.sizes());
    result.back() = y.size(-1);
    return result;
  }
  bool served(int64_t dim) const {
    if (x.dim() != dim || y.dim() != dim || !multipliable({x, y}) || x.size(-1) != y.size(-2)) return false;
    if (dim == 3 && x.size(0) != y.size(0)) return false;
    if (!addend.defined()) return true;
    return multipliable({x, addend}) && real(alpha) && real(beta) && at::is_expandable_to(addend.sizes(), sizes());
  }
  Epilogue epilogue() const {
    Epilogue result;
    result.alpha = alpha.toDouble();
    result.beta = beta.toDouble();
    if (addend.defined() && result.beta != 0) result.bias = addend;  // times 0 it is not read, NaN or not
    return result;
  }
};

// A new tensor with the result; undefined if the native operator has to run.
at::Tensor product(const Product& p, int64_t dim) {
  if (!p.served(dim)) return {};
  const c10::DeviceGuard guard(p.x.device());
  auto out = at::empty(p.sizes(), p.x.options());
  return multiply(p.x, p.y, out, p.epilogue()) ? out : at::Tensor();
}

// The same into `out`, resized as PyTorch does; false if the native operator has to run.
bool product_into(const Product& p, int64_t dim, at::Tensor& out) {
  if (!p.served(dim) || !multipliable({p.x, out}) || repeats_elements(out)) return false;
  const c10::DeviceGuard guard(out.device());
  const auto sizes = p.sizes();
  const auto epilogue = p.epilogue();
  const bool resized = out.sizes() != at::IntArrayRef(sizes);
  const bool overlaps = may_overlap(out, p.x) || may_overlap(out, p.y) ||
                        (epilogue.bias.defined() && may_overlap(out, epilogue.bias) && !same_view(out, epilogue.bias));
  if (!resized && !overlaps) return multiply(p.x, p.y, out, epilogue);
  const auto result = at::empty(sizes, p.x.options());
  if (!multiply(p.x, p.y, result, epilogue)) return false;
  if (resized) at::native::resize_output(out, sizes);
  out.copy_(result);
  return true;
}

// In place: what is added has the shape of the result.
bool product_onto(const Product& p, int64_t dim, at::Tensor& self) {
  return p.served(dim) && self.sizes() == at::IntArrayRef(p.sizes()) && product_into(p, dim, self);
}

at::Tensor mm(const at::Tensor& self, const at::Tensor& mat2) {
  auto out = product({self, mat2, {}}, 2);
  return out.defined() ? out : fallback_of<at::_ops::mm>(self, mat2);
}
at::Tensor& mm_out(const at::Tensor& self, const at::Tensor& mat2, at::Tensor& out) {
  if (!product_into({self, mat2, {}}, 2, out)) fallback_of<at::_ops::mm_out>(self, mat2, out);
  return out;
}

at::Tensor addmm(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  auto out = product({mat1, mat2, self, alpha, beta}, 2);
  return out.defined() ? out : fallback_of<at::_ops::addmm>(self, mat1, mat2, beta, alpha);
}
at::Tensor& addmm_out(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                      const at::Scalar& alpha, at::Tensor& out) {
  if (!product_into({mat1, mat2, self, alpha, beta}, 2, out)) {
    fallback_of<at::_ops::addmm_out>(self, mat1, mat2, beta, alpha, out);
  }
  return out;
}
at::Tensor& addmm_(at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2, const at::Scalar& beta,
                   const at::Scalar& alpha) {
  if (!product_onto({mat1, mat2, self, alpha, beta}, 2, self)) {
    fallback_of<at::_ops::addmm_>(self, mat1, mat2, beta, alpha);
  }
  return self;
}

at::Tensor bmm(const at::Tensor& self, const at::Tensor& mat2) {
  auto out = product({self, mat2, {}}, 3);
  return out.defined() ? out : fallback_of<at::_ops::bmm>(self, mat2);
}
at::Tensor& bmm_out(const at::Tensor& self, const at::Tensor& mat2, at::Tensor& out) {
  if (!product_into({self, mat2, {}}, 3, out)) fallback_of<at::_ops::bmm_out>(self, mat2, out);
  return out;
}

at::Tensor baddbmm(const at::Tensor& self, const at::Tensor& batch1, const at::Tensor& batch2, const at::Scalar& beta,
                   const at::Scalar& alpha) {
  auto out = product({batch1, batch2, self, alpha, beta}, 3);
  return out.defined() ? out : fallback_of<at::_ops::baddbmm>(self, batch1, batch2, beta, alpha);
}
at::Tensor& baddbmm_out(const at::Tensor& self, const at::Tensor& batch1, const at::Tensor& batch2,
                        const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  if (!product_into({batch1, batch2, self, alpha, beta}, 3, out)) {
    fallback_of<at::_ops::baddbmm_out>(self, batch1, batch2, beta, alpha, out);
  }
  return out;
}
at::Tensor& baddbmm_(at::Tensor& self, const at::Tensor& batch1, const at::Tensor& batch2, const at::Scalar& beta,
                     const at::Scalar& alpha) {
  if (!product_onto({batch1, batch2, self, alpha, beta}, 3, self)) {
    fallback_of<at::_ops::baddbmm_>(self, batch1, batch2, beta, alpha);
  }
  return self;
}

// A matrix times a vector is a product with one column.
bool vectors_fit(const at::Tensor& self, const at::Tensor& mat, const at::Tensor& vec) {
  return mat.dim() == 2 && vec.dim() == 1 && self.dim() <= 1 && multipliable({mat, vec, self}) &&
         mat.size(1) == vec.size(0) && (self.numel() == 1 || self.numel() == mat.size(0));
}
at::Tensor column(const at::Tensor& vector) { return vector.dim() == 0 ? vector : vector.unsqueeze(-1); }

at::Tensor addmv(const at::Tensor& self, const at::Tensor& mat, const at::Tensor& vec, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  if (vectors_fit(self, mat, vec)) {
    auto out = product({mat, vec.unsqueeze(-1), column(self), alpha, beta}, 2);
    if (out.defined()) return out.squeeze(-1);
  }
  return fallback_of<at::_ops::addmv>(self, mat, vec, beta, alpha);
}
at::Tensor& addmv_out(const at::Tensor& self, const at::Tensor& mat, const at::Tensor& vec, const at::Scalar& beta,
                      const at::Scalar& alpha, at::Tensor& out) {
  if (vectors_fit(self, mat, vec) && out.dim() == 1 && out.size(0) == mat.size(0)) {
    auto matrix = out.unsqueeze(-1);
    if (product_into({mat, vec.unsqueeze(-1), column(self), alpha, beta}, 2, matrix)) return out;
  }
  fallback_of<at::_ops::addmv_out>(self, mat, vec, beta, alpha, out);
  return out;
}
at::Tensor& addmv_(at::Tensor& self, const at::Tensor& mat, const at::Tensor& vec, const at::Scalar& beta,
                   const at::Scalar& alpha) {
  if (vectors_fit(self, mat, vec) && self.dim() == 1 && self.size(0) == mat.size(0)) {
    auto matrix = self.unsqueeze(-1);
    if (product_into({mat, vec.unsqueeze(-1), matrix, alpha, beta}, 2, matrix)) return self;
  }
  fallback_of<at::_ops::addmv_>(self, mat, vec, beta, alpha);
  return self;
}

at::Tensor dot(const at::Tensor& self, const at::Tensor& tensor) {
  if (self.dim() == 1 && tensor.dim() == 1 && multipliable({self, tensor}) && self.size(0) == tensor.size(0)) {
    auto out = product({self.unsqueeze(0), tensor.unsqueeze(-1), {}}, 2);
    if (out.defined()) return out.reshape({});
  }
  return fallback_of<at::_ops::dot>(self, tensor);
}

}  // namespace

QUARTZ_OPERATORS(matmul) {
  operators.replace<&mm>("mm");
  operators.replace<&mm_out>("mm.out");
  operators.replace<&addmm>("addmm");
  operators.replace<&addmm_out>("addmm.out");
  operators.replace<&addmm_>("addmm_");
  operators.replace<&bmm>("bmm");
  operators.replace<&bmm_out>("bmm.out");
  operators.replace<&baddbmm>("baddbmm");
  operators.replace<&baddbmm_out>("baddbmm.out");
  operators.replace<&baddbmm_>("baddbmm_");
  operators.replace<&addmv>("addmv");
  operators.replace<&addmv_out>("addmv.out");
  operators.replace<&addmv_>("addmv_");
  operators.replace<&dot>("dot");
}

}  // namespace quartz
