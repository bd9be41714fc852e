// Factories: uninitialised memory on a quartz device.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/DeviceGuard.h>

#include "aten/alias.h"
#include "aten/own_kernel.h"
#include "aten/registration.h"

namespace quartz {
namespace {

void check_not_pinned(const char* op, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), op,
              ": Only dense CPU tensors can be pinned: pin_memory=True was given for a quartz tensor");
}

// torch.use_deterministic_algorithms fills new memory with NaN or the largest integer.
at::Tensor finish(at::Tensor tensor) {
  auto& context = at::globalContext();
  if (C10_UNLIKELY(context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())) {
    if (tensor.numel() != 0) {
      auto native = native_alias(tensor);
      at::native::fill_empty_deterministic_(native);
    }
  }
  return tensor;
}

const c10::DispatchKeySet kDense(c10::DispatchKey::PrivateUse1);

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == c10::kStrided, "quartz: empty: expected a strided layout, got ",
                              *layout);
  check_not_pinned("empty", pin_memory);
  const c10::OptionalDeviceGuard guard(device);  // the allocator allocates on the current device
  return finish(at::detail::empty_generic(size, &allocator(), kDense, c10::dtype_or_default(dtype), memory_format));
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(!layout || *layout == c10::kStrided,
                              "quartz: empty_strided: expected a strided layout, got ", *layout);
  check_not_pinned("empty_strided", pin_memory);
  const c10::OptionalDeviceGuard guard(device);  // the allocator allocates on the current device
  return finish(at::detail::empty_strided_generic(size, stride, &allocator(), kDense, c10::dtype_or_default(dtype)));
}

// A tensor of zeros without memory (ZeroTensor key), which autograd uses for gradients known to be zero.
at::Tensor efficient_zero_tensor(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                 std::optional<c10::Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator no_memory(
      c10::Device(kQuartz, resolve_device(device ? device->index() : c10::DeviceIndex(-1))));
  return at::detail::empty_generic(size, &no_memory, kDense | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor),
                                   c10::dtype_or_default(dtype), std::nullopt);
}

}  // namespace

void register_factories(torch::Library& library) {
  own_kernel<&empty>(library, "empty.memory_format");
  own_kernel<&empty_strided>(library, "empty_strided");
  own_kernel<&efficient_zero_tensor>(library, "_efficientzerotensor");
}

}  // namespace quartz
