#include "aten/compiled_call.h"

#include <ATen/ops/clone.h>

#include "aten/alias.h"

namespace quartz {

at::Tensor CompiledCall::to_native(const at::Tensor& input) {
  if (!is_quartz(input)) return input;
  if (!device_.has_value()) device_ = input.device().index();
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  auto native = native_alias(input, AliasKind::kFull);
  if (input.has_storage() && native.has_storage()) {
    const auto& storage = input.storage();
    known_.push_back({storage.getWeakStorageImpl(), native.storage().unsafeGetStorageImpl()});
    if (twin_of(*storage.unsafeGetStorageImpl()) == nullptr) borrowed_.push_back(storage);
  }
  return native;
}

// The living quartz storage over `native`, or null. An address may have been reused since it was noted, hence the
// check.
StoragePtr CompiledCall::find(const c10::StorageImpl& native) const {
  for (const auto& known : known_) {
    if (known.native != &native) continue;
    auto storage = known.storage.lock();
    if (storage && (twin_of(*storage) == &native || storage->data() == native.data())) return storage;
  }
  return {};
}

at::Tensor CompiledCall::to_quartz(const at::Tensor& output, c10::DeviceIndex device) {
  if (!output.defined() || output.device().type() != substrate().native_type()) return output;
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  if (has_special_layout(output.key_set()) || output.layout() != c10::kStrided) {
    return AliasScope(c10::Device(kQuartz, device)).to_quartz(output);
  }
  auto* native = output.storage().unsafeGetStorageImpl();
  c10::Storage storage(find(*native));
  if (storage && storage.device().index() != device) return to_quartz(output.clone(), device);
  if (!storage) {
    storage = adopt_storage(StoragePtr::reclaim_copy(native), device);
    known_.push_back({storage.getWeakStorageImpl(), native});
  }
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), output.dtype());
  copy_metadata(*result.unsafeGetTensorImpl(), output);
  return result;
}

at::Tensor CompiledCall::keep_native(const at::Tensor& output) const {
  if (!output.defined() || !output.has_storage() || !find(*output.storage().unsafeGetStorageImpl())) return output;
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  return output.clone();
}

void CompiledCall::follow_resized_inputs() const {
  for (const auto& known : known_) {
    auto storage = known.storage.lock();
    if (storage && twin_of(*storage) == known.native) follow_resized_twin(*storage);
  }
}

c10::DeviceIndex CompiledCall::device() const { return device_.value_or(current_device()); }

}  // namespace quartz
