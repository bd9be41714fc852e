// Copies between devices, dtypes and layouts. PyTorch sends every copy_ with a quartz side here as _copy_from.
#include <ATen/ops/copy.h>
#include <ATen/ops/zeros_like.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"
#include "runtime/guard.h"

namespace quartz {
namespace {

at::Tensor alias_or_self(const at::Tensor& tensor) { return is_quartz(tensor) ? native_alias(tensor) : tensor; }

// The native copy_ has no kernel for integers of less than a byte, which take a byte each.
bool is_sub_byte(at::ScalarType type) {
  return (type >= at::ScalarType::UInt1 && type <= at::ScalarType::UInt7) ||
         (type >= at::ScalarType::Int1 && type <= at::ScalarType::Int7);
}

// The native copy_ would read or write at address 0.
void check_has_memory(const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK(!tensor.has_storage() || tensor.storage().nbytes() != 0 || tensor.numel() == 0, "copy_: ", argument,
              " must have its memory, got a tensor of shape ", tensor.sizes(), " on ", tensor.device(),
              " whose storage was resized to 0 bytes");
}

// Both sides become native tensors and the native copy_ does the work: host to device, peer to peer, pinned and
// non-blocking as CUDA does them. A copy to pageable memory has finished on return, also with non_blocking.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  check_has_memory("the destination", destination);
  auto target = alias_or_self(destination);
  if (C10_UNLIKELY(self._is_zerotensor())) {
    target.zero_();
    return destination;
  }
  check_has_memory("the source", self);
  auto source = alias_or_self(self);
  if (C10_UNLIKELY(is_sub_byte(source.scalar_type()) && source.scalar_type() == target.scalar_type())) {
    source = source.view(at::kByte);
    target = target.view(at::kByte);
  }
  target.copy_(source, non_blocking);
  return destination;
}

// copy_ of layouts whose native copy_ exchanges the parts of the destination; either side may be on another device.
at::Tensor& copy_layout(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const c10::impl::ExcludeDispatchKeyGuard below(kAboveKernels);
  AliasScope scope;
  auto target = is_quartz(self) ? scope.to_native(self, Operand::kWritten) : self;
  target.copy_(alias_or_self(source), non_blocking);
  if (is_quartz(self)) scope.write_back(self);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, /*non_blocking=*/false);
}

// A copy-on-write clone would share the native block behind our back.
at::Tensor lazy_clone(const at::Tensor& self) { return self.clone(); }

void record_tensor_stream(at::Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

// Without a rule of their own, _copy_from of a conjugated view would materialise it with clone, which copies, which
// calls _copy_from ...: let the bits through, the native copy_ resolves them.
void fall_through(c10::DispatchKey key) {
  auto& library = permanent_library("aten", key);
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
  library.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

}  // namespace

void register_copies(torch::Library& library) {
  own_kernel<&copy_from>(library, "_copy_from");
  own_kernel<&copy_from_and_resize>(library, "_copy_from_and_resize");
  own_kernel<&lazy_clone>(library, "_lazy_clone");
  own_kernel<&record_tensor_stream>(library, "record_stream");
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}) {
    fall_through(key);
  }
  own_kernel<&copy_from>(permanent_library("aten", c10::DispatchKey::QuantizedPrivateUse1), "_copy_from");
  for (auto key : {c10::DispatchKey::SparsePrivateUse1, c10::DispatchKey::SparseCsrPrivateUse1,
                   c10::DispatchKey::NestedTensorPrivateUse1}) {
    own_kernel<&copy_layout>(permanent_library("aten", key), "copy_");
  }
}

}  // namespace quartz
