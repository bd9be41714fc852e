#include "aten/alias.h"

#include <c10/core/GradMode.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <sstream>
#include <unordered_set>

#include "aten/alias_pool.h"

namespace quartz {
namespace {

struct AliasKeys {
  c10::DispatchKeySet lean, full;
};

const AliasKeys& alias_keys() {
  static const AliasKeys keys = [] {
    const auto& native = substrate().keys();
    return AliasKeys{c10::DispatchKeySet(native.dense),
                     c10::DispatchKeySet({native.dense, native.autograd, c10::DispatchKey::ADInplaceOrView})};
  }();
  return keys;
}

// What TensorImpl keeps protected, reached through a derived class. Both functions are for implementations that no one
// else has seen yet.
struct ImplAccess : c10::TensorImpl {
  // Sizes, strides, offset, wrapped-number bit and the flags derived from them (contiguous, channels last, dense ...),
  // which set_sizes_and_strides would compute again: that is half the cost of an alias.
  static void copy_shape(const c10::TensorImpl& from, c10::TensorImpl& to) {
    const auto device = to.*(&ImplAccess::device_opt_);
    copy_generic_tensor_metadata(&from, &to);
    to.*(&ImplAccess::device_opt_) = device;
  }

  // A fresh native tensor becomes a quartz tensor: its storage is the twin of the new one.
  static void relabel(c10::TensorImpl& impl, c10::DispatchKeySet keys, c10::Device device) {
    auto& storage = impl.*(&ImplAccess::storage_);
    storage = adopt_storage(StoragePtr::reclaim(storage.unsafeReleaseStorageImpl()), device.index());
    impl.*(&ImplAccess::key_set_) = keys;
    impl.*(&ImplAccess::device_opt_) = device;
  }
};

// The key sets of dense tensors without conj and neg bits, as the constructor of TensorImpl completes them: outside and
// inside of inference mode.
struct DenseKeys {
  c10::DispatchKeySet normal, inference;

  DenseKeys(c10::DispatchKey backend, c10::DispatchKey autograd, c10::DispatchKey autocast)
      : normal({backend, autograd, autocast, c10::DispatchKey::ADInplaceOrView}), inference({backend, autocast}) {}
};

bool same_storage(const at::Tensor& tensor, const c10::StorageImpl* storage) {
  return tensor.has_storage() && tensor.storage().unsafeGetStorageImpl() == storage;
}

}  // namespace

const c10::DispatchKeySet kAboveKernels =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

c10::DispatchKeySet above_list_writers() {
  return substrate().is_cuda() ? kAboveKernels - c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView) : kAboveKernels;
}

bool has_special_layout(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  static constexpr c10::DispatchKeySet kSpecial({DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::NestedTensor,
                                                 DispatchKey::Quantized, DispatchKey::ZeroTensor});
  // Functionality bits only: kSpecial carries no backend bit.
  return (keys & kSpecial) != c10::DispatchKeySet();
}

void copy_metadata(c10::TensorImpl& destination, const at::Tensor& source) {
  ImplAccess::copy_shape(*source.unsafeGetTensorImpl(), destination);
  if (C10_UNLIKELY(source.is_conj())) destination._set_conj(true);
  if (C10_UNLIKELY(source.is_neg())) destination._set_neg(true);
}

at::Tensor native_alias(const at::Tensor& tensor, AliasKind kind) {
  const auto keys = tensor.key_set();
  TORCH_INTERNAL_ASSERT(!keys.has_any(c10::python_ks),
                        "quartz: a Python-level tensor (FakeTensor or another subclass) reached a kernel");
  if (C10_UNLIKELY(has_special_layout(keys))) return native_alias_of_layout(tensor);
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.has_storage(), "quartz: a tensor without storage (keys ", keys,
                              ") cannot be used by a native kernel");
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(native_storage(*tensor.storage().unsafeGetStorageImpl())),
      kind == AliasKind::kFull ? alias_keys().full : alias_keys().lean, tensor.dtype());
  copy_metadata(*impl, tensor);
  return at::Tensor(std::move(impl));
}

AliasScope::~AliasScope() {
  for (auto& pair : pairs_) {
    if (C10_LIKELY(pair.pooled)) give_back_alias(std::move(pair.native));
  }
}

void AliasScope::take_device(c10::Device device) {
  if (C10_LIKELY(!has_device_)) {
    has_device_ = true;
    device_ = device.has_index() ? device : c10::Device(kQuartz, current_device());
  } else if (C10_UNLIKELY(device.has_index() && device.index() != device_.index())) {
    second_device_ = device;
    misplaced_operand_ = nullptr;
    throw_mixed_devices("", "");
  }
}

const at::Tensor& AliasScope::find_or_make(const at::Tensor& tensor, Operand operand) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (C10_UNLIKELY(!is_quartz(tensor))) {
    // 0-dim CPU tensors are scalars to the kernels that read them; what is larger or written must be where the other
    // operands are.
    if (operand != Operand::kIndex && tensor.defined() && tensor.is_cpu()) {
      const bool scalar = tensor.dim() == 0 && operand == Operand::kRead;
      (scalar ? scalar_operand_ : misplaced_operand_) = impl;
    }
    return tensor;
  }
  for (const auto& pair : pairs_) {
    if (pair.quartz == impl) return pair.native;
  }
  try {
    take_device(tensor.device());
  } catch (const c10::Error&) {
    misplaced_operand_ = impl;
    throw;
  }
  pairs_.push_back(make(tensor, operand));
  return pairs_.back().native;
}

AliasScope::Pair AliasScope::make(const at::Tensor& tensor, Operand operand) const {
  auto* impl = tensor.unsafeGetTensorImpl();
  // Some kernels ask their inputs whether they require grad (_sparse_mm_reduce_impl decides by it what to compute).
  const bool requires_grad = tensor.requires_grad() && c10::GradMode::is_enabled();
  const bool full = requires_grad || operand == Operand::kWritten;
  const auto keys = impl->key_set();
  if (C10_UNLIKELY(has_special_layout(keys) || keys.has_any(c10::python_ks) || !impl->unsafe_storage() ||
                   (full && impl->is_inference()))) {
    auto native = native_alias(tensor, full ? AliasKind::kFull : AliasKind::kLean);
    if (operand == Operand::kWritten && !tensor.is_inference()) {
      native.unsafeGetTensorImpl()->set_version_counter(impl->version_counter());
    }
    if (requires_grad && !native.requires_grad()) native.set_requires_grad(true);
    if (native.has_storage() && !native.storage().resizable()) {
      unlock_twin(*native.storage().unsafeGetStorageImpl(), /*holders=*/2);
      if (!native.storage().resizable()) share_borrowed(tensor, native);
    }
    return {impl, std::move(native), false};
  }
  c10::Storage storage(native_storage(*tensor.storage().unsafeGetStorageImpl()));
  // Two hold it: the quartz storage, and `storage` here.
  if (C10_UNLIKELY(!storage.resizable())) unlock_twin(*storage.unsafeGetStorageImpl(), /*holders=*/2);
  const bool borrowed = !storage.resizable();
  auto native = take_alias(std::move(storage), full ? alias_keys().full : alias_keys().lean, *impl);
  if (C10_UNLIKELY(borrowed)) share_borrowed(tensor, native);
  if (full) {
    // A kernel that counts versions itself (CUDA's foreach operators) counts them for the tensor it stands for.
    native.unsafeGetTensorImpl()->set_version_counter(impl->version_counter());
    if (requires_grad) native.set_requires_grad(true);
  }
  return {impl, std::move(native), true};
}

// Memory of another origin (from_blob) has no twin. The aliases of tensors over one storage get one borrowed storage,
// by which kernels see that their operands overlap.
void AliasScope::share_borrowed(const at::Tensor& tensor, const at::Tensor& native) const {
  for (const auto& pair : pairs_) {
    if (pair.quartz->has_storage() && pair.native.has_storage() &&
        pair.quartz->storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {
      native.unsafeGetTensorImpl()->set_storage_keep_dtype(pair.native.storage());
    }
  }
}

c10::Storage AliasScope::to_native(const c10::Storage& storage) {
  if (storage.device_type() != kQuartz) return storage;
  take_device(storage.device());
  c10::Storage native(native_storage(*storage.unsafeGetStorageImpl()));
  storages_.push_back({storage, native.unsafeGetStorageImpl()});
  return native;
}

void throw_mixed_devices(c10::Device first, c10::Device second, const std::string& op, const std::string& argument) {
  std::ostringstream details;
  if (!op.empty()) details << "operator " << op;
  if (!argument.empty()) details << ", argument '" << argument << "'";
  if (second.type() == kQuartz) {
    // which of them should move is the caller's choice
  } else if (argument == "out") {
    details << ": out= must be on " << first;  // a moved copy would take the result instead of the caller's tensor
  } else {
    details << ": move the CPU tensor with .to(\"" << first << "\")";
  }
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first, " and ",
              second, "!", details.str().empty() ? "" : " (" + details.str() + ")");
}

bool refuses_scalars(const std::string& name) {
  static const std::unordered_set<std::string> operators{"aten::addmm",
                                                         "aten::addmv",
                                                         "aten::addr",
                                                         "aten::baddbmm",
                                                         "aten::bucketize",
                                                         "aten::embedding",
                                                         "aten::embedding_dense_backward",
                                                         "aten::equal",
                                                         "aten::gather",
                                                         "aten::index_add",
                                                         "aten::index_copy",
                                                         "aten::index_reduce",
                                                         "aten::index_select",
                                                         "aten::masked_scatter",
                                                         "aten::masked_select",
                                                         "aten::multi_margin_loss",
                                                         "aten::nll_loss2d_forward",
                                                         "aten::nll_loss_forward",
                                                         "aten::put",
                                                         "aten::scatter",
                                                         "aten::scatter_add",
                                                         "aten::scatter_reduce",
                                                         "aten::searchsorted",
                                                         "aten::take"};
  auto base = name.substr(0, name.find('.'));  // of every overload
  if (base.size() > 6 && base.back() == '_') base.pop_back();
  return operators.count(base) != 0;
}

void AliasScope::throw_mixed_devices(const std::string& op, const std::string& argument) const {
  quartz::throw_mixed_devices(device_, second_device_, op, argument);
}

bool AliasScope::is_alias_of_argument(const at::Tensor& native) const {
  if (!native.defined() || !native.has_storage()) return false;
  for (const auto& pair : pairs_) {
    if (pair.native.has_storage() && pair.native.storage().is_alias_of(native.storage())) return true;
  }
  return false;
}

c10::Storage AliasScope::storage_for(const c10::Storage& native) {
  auto* impl = native.unsafeGetStorageImpl();
  for (const auto& pair : pairs_) {
    if (!pair.quartz->has_storage()) continue;
    const auto& storage = pair.quartz->storage();
    // Its twin, or borrowed memory of another origin (from_blob) unless a kernel has put a foreign storage into the
    // alias (set_).
    if (twin_of(*storage.unsafeGetStorageImpl()) == impl ||
        (same_storage(pair.native, impl) && storage.data() == impl->data())) {
      return storage;
    }
  }
  for (const auto& known : storages_) {
    if (twin_of(*known.quartz.unsafeGetStorageImpl()) == impl ||
        (known.native == impl && known.quartz.data() == impl->data())) {
      return known.quartz;
    }
  }
  storages_.push_back({adopt_storage(StoragePtr::reclaim_copy(impl), result_device().index()), impl});
  return storages_.back().quartz;
}

at::Tensor AliasScope::to_quartz(const at::Tensor& native) {
  if (!native.defined() || native.device().type() != substrate().native_type()) return native;
  for (const auto& pair : pairs_) {
    if (pair.native.is_same(native)) return pair.tensor();
  }
  if (C10_UNLIKELY(has_special_layout(native.key_set()) || native.layout() != c10::kStrided)) {
    return adopt_layout(native);
  }
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      storage_for(native.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), native.dtype());
  copy_metadata(*result.unsafeGetTensorImpl(), native);
  return result;
}

at::Tensor AliasScope::relabel_or_adopt(at::Tensor native) {
  using c10::DispatchKey;
  static const DenseKeys ours(DispatchKey::PrivateUse1, DispatchKey::AutogradPrivateUse1,
                              DispatchKey::AutocastPrivateUse1);
  static const DenseKeys theirs =
      substrate().is_cuda() ? DenseKeys(DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA)
                            : DenseKeys(DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU);
  auto* impl = native.unsafeGetTensorImpl();
  const auto keys = impl->key_set();
  const bool inference = keys == theirs.inference;
  if (C10_UNLIKELY(!(inference || keys == theirs.normal) || native.use_count() != 1 ||
                   impl->unsafe_storage().use_count() != 1)) {
    return to_quartz(native);
  }
  ImplAccess::relabel(*impl, inference ? ours.inference : ours.normal, result_device());
  return native;
}

at::Tensor AliasScope::Pair::tensor() const {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(quartz));
}

void AliasScope::follow_resized() {
  for (const auto& pair : pairs_) {
    if (pair.quartz->has_storage()) follow_resized_twin(*pair.quartz->storage().unsafeGetStorageImpl());
  }
}

void AliasScope::write_back(const at::Tensor& tensor) {
  const Pair* found = nullptr;
  for (const auto& pair : pairs_) {
    if (pair.quartz == tensor.unsafeGetTensorImpl()) found = &pair;
  }
  if (found == nullptr) return;
  const Pair& pair = *found;
  if (C10_UNLIKELY(has_special_layout(pair.quartz->key_set()))) {
    write_back_layout(pair);
    if (!pair.quartz->key_set().has(c10::DispatchKey::Quantized)) return;  // a quantized one is strided, too
  }

  auto* quartz = pair.quartz;
  auto* native = pair.native.unsafeGetTensorImpl();
  auto* storage = quartz->storage().unsafeGetStorageImpl();
  auto* native_impl = pair.native.storage().unsafeGetStorageImpl();
  if (C10_UNLIKELY(storage->data() != native_impl->data() || storage->nbytes() != native_impl->nbytes())) {
    const bool same_twin = twin_of(*storage) == native_impl;
    if (same_twin) {
      follow_twin(*storage, StoragePtr::reclaim_copy(native_impl));  // the kernel resized it
    } else {
      quartz->set_storage_keep_dtype(storage_for(pair.native.storage()));  // the kernel exchanged it (set_)
    }
  }
  if (C10_UNLIKELY(!quartz->sizes().equals(native->sizes()) || !quartz->strides().equals(native->strides()) ||
                   quartz->storage_offset() != native->storage_offset())) {
    quartz->set_sizes_and_strides(native->sizes(), native->strides(), native->storage_offset());
  }
  if (C10_UNLIKELY(native->is_conj() != quartz->is_conj())) quartz->_set_conj(native->is_conj());
  if (C10_UNLIKELY(native->is_neg() != quartz->is_neg())) quartz->_set_neg(native->is_neg());
}

}  // namespace quartz
