// Pinned host memory of the host substrate: ordinary memory that is remembered, so that is_pinned() is true for it.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace quartz {

at::HostAllocator& host_pinned_allocator();

// True for every address inside a live pinned block.
bool host_pointer_is_pinned(const void* pointer);

}  // namespace quartz
