// The device type and the current device of a thread.
#pragma once

#include <c10/core/Device.h>

#include "runtime/export.h"

namespace quartz {

inline constexpr c10::DeviceType kQuartz = c10::DeviceType::PrivateUse1;
inline constexpr int kMaxDevices = 16;  // tables indexed by device are sized by this

QUARTZ_API c10::DeviceIndex device_count();
QUARTZ_API c10::DeviceIndex current_device();

// RuntimeError when the index names no device.
QUARTZ_API void check_device(c10::DeviceIndex index);
QUARTZ_API void set_device(c10::DeviceIndex index);

// Makes `index` current unless it is negative; returns the device that was current.
QUARTZ_API c10::DeviceIndex exchange_device(c10::DeviceIndex index);

// -1 stands for the current device.
QUARTZ_API c10::DeviceIndex resolve_device(c10::DeviceIndex index);

}  // namespace quartz
