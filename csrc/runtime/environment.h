// The environment variables that the C++ half reads: the only getenv calls of libquartz.so.
// docs/environment.md lists them all; the Python half reads its own in python/torch_quartz/environment.py.
#pragma once

#include <optional>
#include <string>

namespace quartz {

struct Environment {
  std::optional<std::string> substrate;             // TORCH_QUARTZ_SUBSTRATE: "host" or "cuda"; unset chooses by itself
  std::optional<std::string> cuda_visible_devices;  // CUDA_VISIBLE_DEVICES, CUDA's own; an empty text hides all devices
  int host_devices = 1;                             // TORCH_QUARTZ_HOST_DEVICES: number of host devices, 1 to 16
  std::optional<std::string> cpu_isa;               // TORCH_QUARTZ_CPU_ISA: "avx2", "avx512" or "avx512_bf16" at most
};

// Read once, at the first call; a malformed value throws c10::ValueError with the variable, the rule and the value.
const Environment& environment();

}  // namespace quartz
