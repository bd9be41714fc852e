// Registration of the device guard, and the mapping of streams to the substrate's own.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include "runtime/export.h"

namespace quartz {

void register_guard();

// The stream of the substrate's guard with the same id: a cuda stream on cuda, the stream itself on host.
QUARTZ_API c10::Stream native_stream(const c10::Stream& stream);

// Tells the allocator that `stream` uses the memory, so that it is not handed out again before that use has ended.
QUARTZ_API void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream);

}  // namespace quartz
