#include "runtime/host_guard.h"

#include <c10/util/Exception.h>
#include <array>
#include <atomic>
#include <chrono>

#include "runtime/device.h"
#include "runtime/environment.h"
#include "runtime/graph_host.h"

namespace quartz {
namespace {

using Clock = std::chrono::steady_clock;

struct HostEvent {
  Clock::time_point recorded;
};

thread_local c10::DeviceIndex t_device = 0;
thread_local std::array<c10::StreamId, kMaxDevices> t_streams{};  // current stream of each device; 0 is the default
std::atomic<c10::StreamId> next_stream{1};

c10::Stream make_stream(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kQuartz, device), id);
}

c10::DeviceIndex resolve(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }

class HostGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kQuartz; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous(kQuartz, t_device);
    setDevice(device);
    return previous;
  }
  c10::Device getDevice() const override { return c10::Device(kQuartz, t_device); }
  void setDevice(c10::Device device) const override {
    if (device.index() < 0) return;
    check_device(device.index());
    t_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < deviceCount()) t_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    static const auto count = static_cast<c10::DeviceIndex>(environment().host_devices);
    return count;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    const auto index = resolve(device);
    check_device(index);
    return make_stream(index, t_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const auto index = resolve(device);
    check_device(index);
    return make_stream(index, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return new_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return new_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto index = resolve(stream.device());
    check_device(index);
    const auto previous = t_streams[index];
    t_streams[index] = stream.id();
    return make_stream(index, previous);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  // Nothing to wait for, but what a CUDA graph refuses is refused here, too.
  void synchronizeStream(const c10::Stream&) const override {
    refuse_in_capture("Stream.synchronize()", "waits on the host, which a graph cannot hold; wait after the replay");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_device(device < 0 ? t_device : device);
    refuse_in_capture("synchronize()", "waits on the host, which a graph cannot hold; wait after the replay");
  }

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new HostEvent;
    static_cast<HostEvent*>(*event)->recorded = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<HostEvent*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { refuse_waiting_for_event_in_capture(); }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start != nullptr && end != nullptr,
                "quartz: Event.elapsed_time: both events must be recorded before the time between them is asked for");
    const auto elapsed = static_cast<HostEvent*>(end)->recorded - static_cast<HostEvent*>(start)->recorded;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }

 private:
  static c10::Stream new_stream(c10::Device device) {
    const auto index = resolve(device);
    check_device(index);
    return make_stream(index, next_stream.fetch_add(1, std::memory_order_relaxed));
  }
};

}  // namespace

const c10::impl::DeviceGuardImplInterface& host_guard() {
  static const auto* guard = new HostGuard;
  return *guard;
}

}  // namespace quartz
