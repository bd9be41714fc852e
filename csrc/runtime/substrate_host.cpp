// The host substrate: quartz memory is CPU memory, streams are synchronous.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/Resize.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>
#include <cstring>

#include "runtime/allocator.h"
#include "runtime/host_guard.h"
#include "runtime/host_pinned.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

class HostSubstrate final : public Substrate {
 public:
  HostSubstrate()
      : Substrate("host", c10::DeviceType::CPU, kQuartz,
                  {c10::DispatchKey::CPU, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU,
                   c10::DispatchKey::NestedTensorCPU, c10::DispatchKey::QuantizedCPU, c10::DispatchKey::AutogradCPU}) {}

  const c10::impl::DeviceGuardImplInterface& guard() const override { return host_guard(); }
  void initialize() const override {}
  bool initialized() const override { return true; }
  bool has_context(c10::DeviceIndex) const override { return true; }
  bool in_bad_fork() const override { return false; }

  c10::Allocator* native_allocator() const override { return c10::GetCPUAllocator(); }
  void copy_bytes(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }
  void resize_bytes(c10::StorageImpl& twin, std::size_t nbytes) const override {
    at::native::resize_bytes_cpu(&twin, nbytes);
  }
  void empty_cache() const override {}
  void record_stream(const c10::DataPtr&, c10::Stream) const override {}  // synchronous: no use is ever pending
  c10::DeviceIndex device_of_pointer(void*) const override { return current_device(); }

  std::pair<std::size_t, std::size_t> memory_info(c10::DeviceIndex) const override {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return {page * static_cast<std::size_t>(sysconf(_SC_AVPHYS_PAGES)),
            page * static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES))};
  }
  bool counts_bytes() const override { return true; }
  c10::CachingDeviceAllocator::DeviceStats device_stats(c10::DeviceIndex device) const override {
    return host_stats(device);
  }
  void reset_accumulated_stats(c10::DeviceIndex device) const override { reset_host_accumulated(device); }
  void reset_peak_stats(c10::DeviceIndex device) const override { reset_host_peak(device); }

  at::HostAllocator* pinned_allocator() const override { return &host_pinned_allocator(); }
  bool is_pinned(const void* pointer) const override { return host_pointer_is_pinned(pointer); }

  at::Generator default_native_generator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Generator new_native_generator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  bool take_captured_blocks(const at::Generator&, uint64_t, kernels::RandomSource*) const override { return false; }
};

}  // namespace

const Substrate& host_substrate() {
  static const auto* host = new HostSubstrate;
  return *host;
}

}  // namespace quartz
