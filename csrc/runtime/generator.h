// Random number generators of quartz devices.
//
// A quartz generator holds two sequences under one seed: a counter, from which this project's kernels draw (the same
// numbers on host and CUDA), and a native generator for the native kernels that the fallback runs.
#pragma once

#include <ATen/core/Generator.h>

#include <optional>

#include "runtime/export.h"

namespace quartz {

namespace kernels {
struct RandomSource;  // philox.h
}

// The default generator of a device (-1: the current one).
QUARTZ_API const at::Generator& default_generator(c10::DeviceIndex device);
QUARTZ_API at::Generator new_generator(c10::DeviceIndex device);

// The native generator inside a quartz generator, for native kernels.
QUARTZ_API const at::Generator& native_generator(const at::Generator& generator);

// The generator argument of an operator on `device`, or the device's default one; RuntimeError if it is another
// device's.
QUARTZ_API at::Generator generator_or_default(const std::optional<at::Generator>& generator, c10::Device device);

// Takes `blocks` blocks of four random words from the counter; no other draw gets them. While the current stream
// records a CUDA graph the counter stays, and the words are those of the native generator's seed and offset at each
// replay.
QUARTZ_API kernels::RandomSource take_random_blocks(const at::Generator& generator, uint64_t blocks);

}  // namespace quartz
