// What PyTorch's event-based profiler asks of a device: torch.autograd.profiler.profile(use_device="quartz",
// use_kineto=False) and the record_function ranges of emit_* modes. Without them it fails inside every operator.
//
// torch.profiler needs nothing of this: operators are CPU-side events there, and on the cuda substrate CUPTI sees the
// kernels that quartz operators launch.
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "runtime/device.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

using torch::profiler::impl::ProfilerVoidEventStub;

const c10::Event& event_of(const ProfilerVoidEventStub& stub) { return *static_cast<const c10::Event*>(stub.get()); }

class QuartzStubs final : public torch::profiler::impl::ProfilerStubs {
 public:
  void record(c10::DeviceIndex* device, ProfilerVoidEventStub* event, int64_t* cpu_ns) const override {
    const c10::impl::VirtualGuardImpl guard(kQuartz);
    const auto current = guard.getDevice();
    auto recorded = std::make_shared<c10::Event>(kQuartz, c10::EventFlag::BACKEND_DEFAULT);
    if (device != nullptr) *device = current.index();
    if (cpu_ns != nullptr) *cpu_ns = c10::getTime();
    recorded->record(guard.getStream(current));
    *event = std::move(recorded);
  }

  // In microseconds.
  float elapsed(const ProfilerVoidEventStub* start, const ProfilerVoidEventStub* end) const override {
    event_of(*start).synchronize();
    event_of(*end).synchronize();
    return static_cast<float>(event_of(*start).elapsedTime(event_of(*end)) * 1000.0);
  }

  bool enabled() const override { return true; }

  // Ranges in the tools of the native device (NVTX); the host has none.
  void mark(const char* name) const override {
    if (native() != nullptr) native()->mark(name);
  }
  void rangePush(const char* name) const override {
    if (native() != nullptr) native()->rangePush(name);
  }
  void rangePop() const override {
    if (native() != nullptr) native()->rangePop();
  }

  void onEachDevice(std::function<void(int)> op) const override {
    for (c10::DeviceIndex index = 0; index < device_count(); ++index) op(index);
  }

  void synchronize() const override { substrate().guard().synchronizeDevice(current_device()); }

 private:
  static const ProfilerStubs* native() { return substrate().is_cuda() ? torch::profiler::impl::cudaStubs() : nullptr; }
};

// At load; leaked, since PyTorch keeps the pointer for good.
[[maybe_unused]] const bool registered = [] {
  torch::profiler::impl::registerPrivateUse1Methods(new QuartzStubs);
  return true;
}();

}  // namespace
}  // namespace quartz
