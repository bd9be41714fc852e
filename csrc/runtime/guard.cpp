// The DeviceGuardImplInterface of PrivateUse1: the substrate's guard, spoken to in quartz devices.
#include "runtime/guard.h"

#include "runtime/substrate.h"
#include "runtime/torch_version.h"

namespace quartz {
namespace {

c10::Device native(c10::Device device) {
  TORCH_CHECK(device.type() == kQuartz, "quartz: expected a quartz device, got ", device);
  return substrate().guard_device(device.index());
}

c10::Device quartz_device(c10::Device device) { return c10::Device(kQuartz, device.index()); }

c10::Stream quartz_stream(const c10::Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, quartz_device(stream.device()), stream.id());
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kQuartz; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kQuartz, exchange_device(native(device).index()));
  }
  c10::Device getDevice() const override { return quartz_device(inner().getDevice()); }
  void setDevice(c10::Device device) const override { exchange_device(native(device).index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    // For an unknown device PyTorch's CUDA guard would throw, and with that end the process.
    if (device.index() < 0 || device.index() >= deviceCount()) return;
    inner().uncheckedSetDevice(substrate().guard_device(device.index()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return inner().deviceCount(); }
  // Every dtype, on both substrates; PyTorch's CUDA guard does not answer.
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return quartz_stream(inner().getStream(native(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return quartz_stream(inner().getDefaultStream(indexed(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return quartz_stream(inner().getStreamFromGlobalPool(indexed(device), high_priority));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return quartz_stream(inner().getNewStream(indexed(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return quartz_stream(inner().exchangeStream(native_stream(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return inner().getStreamNativeHandle(native_stream(stream));
  }
  bool queryStream(const c10::Stream& stream) const override { return inner().queryStream(native_stream(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { inner().synchronizeStream(native_stream(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { inner().synchronizeDevice(device); }
#if QUARTZ_TORCH_VERSION >= 213
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return substrate().is_cuda() && inner().isStreamCapturing(native_stream(stream));
  }
#endif

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    inner().record(event, native_stream(stream), device, flag);
  }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    inner().destroyEvent(event, device);
  }
  void block(void* event, const c10::Stream& stream) const override { inner().block(event, native_stream(stream)); }
  bool queryEvent(void* event) const override { return inner().queryEvent(event); }
  void synchronizeEvent(void* event) const override { inner().synchronizeEvent(event); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex device) const override {
    return inner().elapsedTime(start, end, device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, stream);
  }

 private:
  static const c10::impl::DeviceGuardImplInterface& inner() { return substrate().guard(); }
  // CUDA's stream functions build a Stream from the device as it is, so -1 must be resolved first.
  static c10::Device indexed(c10::Device device) {
    return substrate().guard_device(resolve_device(native(device).index()));
  }
};

}  // namespace

c10::Stream native_stream(const c10::Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, substrate().guard_device(stream.device_index()), stream.id());
}

void register_guard() {
  static const auto* guard = new Guard;
  c10::impl::DeviceGuardImplRegistrar(kQuartz, guard);
}

}  // namespace quartz
