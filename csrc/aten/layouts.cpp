// Aliases of tensors that are not strided: each is rebuilt around the aliases of its parts, so no value is copied.
#include <ATen/EmptyTensor.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/DeviceGuard.h>

#include "aten/alias.h"

namespace quartz {
namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

at::SparseTensorImpl* sparse(const Tensor& tensor) {
  return static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}
at::SparseCsrTensorImpl* compressed(const Tensor& tensor) {
  return static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

void fill_sparse(const Tensor& destination, const Tensor& source, const Tensor& indices, const Tensor& values) {
  auto* to = sparse(destination);
  auto* from = sparse(source);
  to->raw_resize_(from->sparse_dim(), from->dense_dim(), source.sizes());
  to->set_indices_and_values_unsafe(indices, values);
  to->set_coalesced(from->coalesced());
}

Tensor make_sparse(DispatchKey key, const Tensor& source, const Tensor& indices, const Tensor& values) {
  // The constructor makes empty parts on the current device, which the parts given must be on.
  const c10::OptionalDeviceGuard guard(indices.device().has_index() ? std::optional(indices.device()) : std::nullopt);
  auto result = at::detail::make_tensor<at::SparseTensorImpl>(DispatchKeySet(key), source.dtype());
  fill_sparse(result, source, indices, values);
  return result;
}

Tensor make_compressed(DispatchKey key, c10::Device device, const Tensor& source, const Tensor& outer,
                       const Tensor& plain, const Tensor& values) {
  auto result =
      at::detail::make_tensor<at::SparseCsrTensorImpl>(DispatchKeySet(key), device, source.layout(), source.dtype());
  compressed(result)->set_member_tensors(outer, plain, values, source.sizes());
  return result;
}

// The size and stride tables of a nested tensor live on the CPU for every device.
Tensor make_nested(DispatchKey key, c10::Storage storage, const Tensor& source) {
  auto* impl = at::native::get_nested_tensor_impl(source);
  return at::detail::make_tensor<at::native::NestedTensorImpl>(
      std::move(storage), DispatchKeySet({key, DispatchKey::AutogradNestedTensor}), source.dtype(),
      impl->get_nested_sizes(), impl->get_nested_strides(), impl->get_storage_offsets());
}

Tensor make_quantized(DispatchKey key, c10::Storage storage, const Tensor& source) {
  auto result = at::detail::make_tensor<at::QTensorImpl>(std::move(storage), DispatchKeySet(key), source.dtype(),
                                                         at::get_qtensorimpl(source)->quantizer());
  copy_metadata(*result.unsafeGetTensorImpl(), source);
  return result;
}

Tensor alias_part(const Tensor& part) { return is_quartz(part) ? native_alias(part) : part; }

[[noreturn]] void throw_unsupported(const Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "quartz: tensors of layout ", tensor.layout(), " (keys ", tensor.key_set(),
                              ") are not supported: convert with .to_dense() on the CPU first");
}

}  // namespace

Tensor native_alias_of_layout(const Tensor& tensor) {
  const auto& keys = substrate().keys();
  const auto native_device = substrate().native_device(tensor.device().index());
  if (tensor._is_zerotensor()) return at::_efficientzerotensor(tensor.sizes(), tensor.options().device(native_device));
  if (tensor.layout() == c10::kSparse) {
    return make_sparse(keys.sparse, tensor, alias_part(sparse(tensor)->indices()),
                       alias_part(sparse(tensor)->values()));
  }
  if (at::sparse_csr::is_sparse_compressed(tensor)) {
    auto* impl = compressed(tensor);
    return make_compressed(keys.sparse_csr, native_device, tensor, alias_part(impl->compressed_indices()),
                           alias_part(impl->plain_indices()), alias_part(impl->values()));
  }
  if (tensor.is_nested() && tensor.layout() == c10::kStrided) {
    return make_nested(keys.nested, native_storage(*tensor.storage().unsafeGetStorageImpl()), tensor);
  }
  if (tensor.is_quantized()) {
    return make_quantized(keys.quantized, native_storage(*tensor.storage().unsafeGetStorageImpl()), tensor);
  }
  throw_unsupported(tensor);
}

Tensor AliasScope::adopt_layout(const Tensor& native) {
  if (native._is_zerotensor()) {
    at::native::ZeroTensorAllocator no_memory(result_device());
    return at::detail::empty_generic(native.sizes(), &no_memory,
                                     DispatchKeySet({DispatchKey::PrivateUse1, DispatchKey::ZeroTensor}),
                                     native.scalar_type(), std::nullopt);
  }
  if (native.layout() == c10::kSparse) {
    return make_sparse(DispatchKey::SparsePrivateUse1, native, to_quartz(sparse(native)->indices()),
                       to_quartz(sparse(native)->values()));
  }
  if (at::sparse_csr::is_sparse_compressed(native)) {
    auto* impl = compressed(native);
    return make_compressed(DispatchKey::SparseCsrPrivateUse1, result_device(), native,
                           to_quartz(impl->compressed_indices()), to_quartz(impl->plain_indices()),
                           to_quartz(impl->values()));
  }
  if (native.is_nested() && native.layout() == c10::kStrided) {
    return make_nested(DispatchKey::NestedTensorPrivateUse1, storage_for(native.storage()), native);
  }
  if (native.is_quantized()) {
    return make_quantized(DispatchKey::QuantizedPrivateUse1, storage_for(native.storage()), native);
  }
  throw_unsupported(native);
}

void AliasScope::write_back_layout(const Pair& pair) {
  const auto quartz = pair.tensor();
  if (quartz.layout() == c10::kSparse) {
    fill_sparse(quartz, pair.native, to_quartz(sparse(pair.native)->indices()),
                to_quartz(sparse(pair.native)->values()));
  } else if (at::sparse_csr::is_sparse_compressed(quartz)) {
    auto* impl = compressed(pair.native);
    compressed(quartz)->set_member_tensors(to_quartz(impl->compressed_indices()), to_quartz(impl->plain_indices()),
                                           to_quartz(impl->values()), pair.native.sizes());
  } else if (quartz.is_quantized()) {
    at::get_qtensorimpl(quartz)->set_quantizer_(at::get_qtensorimpl(pair.native)->quantizer());
  }
  // Zero tensors cannot be written to, and the tables of a nested tensor do not change under in-place operators.
}

}  // namespace quartz
