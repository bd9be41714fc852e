// Random number generators of quartz devices.
#pragma once

#include <ATen/core/Generator.h>

#include "runtime/export.h"

namespace quartz {

// The default generator of a device (-1: the current one).
QUARTZ_API const at::Generator& default_generator(c10::DeviceIndex device);
QUARTZ_API at::Generator new_generator(c10::DeviceIndex device);

// The native generator inside a quartz generator, for native kernels.
QUARTZ_API const at::Generator& native_generator(const at::Generator& generator);

}  // namespace quartz
