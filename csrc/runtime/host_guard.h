// Devices, streams and events of the host substrate.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace quartz {

// Streams are synchronous: an operator has finished when its call returns. A stream is therefore only a number, waiting
// never blocks, and an event is a time stamp.
const c10::impl::DeviceGuardImplInterface& host_guard();

}  // namespace quartz
