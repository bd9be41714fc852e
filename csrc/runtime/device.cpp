#include "runtime/device.h"

#include <c10/util/Exception.h>

#include "runtime/substrate.h"

namespace quartz {

c10::DeviceIndex device_count() { return substrate().guard().deviceCount(); }

c10::DeviceIndex current_device() { return substrate().guard().getDevice().index(); }

void check_device(c10::DeviceIndex index) {
  const int count = device_count();
  // PyTorch keeps 8 bits of an index: "quartz:200" arrives here as -56.
  const int asked = index < -1 ? static_cast<uint8_t>(index) : index;
  TORCH_CHECK(index >= 0 && index < count, "quartz: invalid device ordinal ", asked, ": there ",
              count == 1
                  ? "is 1 device (quartz:0)"
                  : "are " + std::to_string(count) + " devices (quartz:0 to quartz:" + std::to_string(count - 1) + ")");
}

void set_device(c10::DeviceIndex index) {
  check_device(index);
  substrate().guard().setDevice(substrate().guard_device(index));
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  const auto previous = current_device();
  if (index != -1 && index != previous) set_device(index);
  return previous;
}

c10::DeviceIndex resolve_device(c10::DeviceIndex index) {
  if (index < -1) check_device(index);
  return index < 0 ? current_device() : index;
}

}  // namespace quartz
