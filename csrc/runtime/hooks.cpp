#include "runtime/hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "runtime/allocator.h"
#include "runtime/generator.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  void init() const override { substrate().initialize(); }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < device_count() && substrate().has_context(device);
  }

  c10::DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::Device getDeviceFromPtr(void* data) const override {
    return c10::Device(kQuartz, substrate().device_of_pointer(data));
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }

  bool isPinnedPtr(const void* data) const override { return substrate().is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return substrate().pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

}  // namespace

void register_hooks() {
  static auto* hooks = new Hooks;
  at::RegisterPrivateUse1HooksInterface(hooks);
  at::setHostAllocator(kQuartz, substrate().pinned_allocator(), /*priority=*/1);
}

}  // namespace quartz
