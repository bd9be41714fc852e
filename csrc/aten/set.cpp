// set_: a tensor takes over another storage, and the question whether two tensors may exchange their implementation.
#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

at::Tensor& set_storage(at::Tensor& self, c10::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", source.device(),
              "\".  This is no longer allowed; the devices must match.");
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  for (const auto length : size) TORCH_CHECK(length >= 0, "set_: sizes must not be negative, got ", size);
  for (const auto step : stride) TORCH_CHECK(step >= 0, "set_: strides must not be negative, got ", stride);
  const bool contiguous = stride.data() == nullptr || (stride.empty() && !size.empty());
  TORCH_CHECK(contiguous || size.size() == stride.size(), "unequal size length (", size.size(), ") and stride length (",
              stride.size(), ")");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (contiguous) {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  const auto needed = impl->numel() == 0 ? 0
                                         : at::detail::computeStorageNbytes(impl->sizes(), impl->strides(),
                                                                            impl->dtype().itemsize(), offset);
  if (needed > source.nbytes()) resize_storage(*source.unsafeGetStorageImpl(), needed);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage empty(c10::Storage::use_byte_size_t(), 0, &allocator(), /*resizable=*/true);
  return set_storage(self, std::move(empty), 0, {0}, {});
}

// Whether `self.data = from` and Module.to may exchange the implementation instead of making a new Parameter. PyTorch's
// own list of pairs (TensorImpl::has_compatible_shallow_copy_type) leaves PrivateUse1 out, which would break tied
// weights and optimisers at every module.to("quartz").
bool compatible(const at::Tensor& self, const at::Tensor& from) {
  using c10::BackendComponent;
  using c10::DispatchKey;
  const auto a = self.key_set(), b = from.key_set();
  if (a == b) return true;
  static const c10::DispatchKeySet kBackends({BackendComponent::CPUBit, BackendComponent::CUDABit,
                                              BackendComponent::MetaBit, BackendComponent::PrivateUse1Bit});
  const auto both = [&](DispatchKey kind) {
    return a.has(kind) && b.has(kind) && a.has_any(kBackends) && b.has_any(kBackends);
  };
  return both(DispatchKey::Dense) || both(DispatchKey::Sparse) || both(DispatchKey::SparseCsr);
}

}  // namespace

void register_set(torch::Library& library) {
  for (auto* each : {&library, &permanent_library("aten", c10::DispatchKey::QuantizedPrivateUse1)}) {
    own_kernel<&set_whole_storage>(*each, "set_.source_Storage");
    own_kernel<&set_storage>(*each, "set_.source_Storage_storage_offset");
    own_kernel<&set_tensor>(*each, "set_.source_Tensor");
    own_kernel<&set_nothing>(*each, "set_");
  }
  own_kernel<&compatible>(library, "_has_compatible_shallow_copy_type");
}

}  // namespace quartz
