#include "runtime/environment.h"

#include <c10/util/Exception.h>
#include <cstdlib>

#include "runtime/device.h"

namespace quartz {
namespace {

std::optional<std::string> read(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

Environment read_all() {
  Environment env;
  env.substrate = read("TORCH_QUARTZ_SUBSTRATE");
  TORCH_CHECK_VALUE(!env.substrate || *env.substrate == "host" || *env.substrate == "cuda",
                    "quartz: TORCH_QUARTZ_SUBSTRATE must be 'host' or 'cuda', got '", *env.substrate, "'");
  if (const char* devices = std::getenv("CUDA_VISIBLE_DEVICES")) env.cuda_visible_devices = devices;
  if (auto text = read("TORCH_QUARTZ_HOST_DEVICES")) {
    char* end = nullptr;
    const long count = std::strtol(text->c_str(), &end, 10);
    TORCH_CHECK_VALUE(*end == '\0' && count >= 1 && count <= kMaxDevices,
                      "quartz: TORCH_QUARTZ_HOST_DEVICES must be an integer from 1 to ", kMaxDevices, ", got '", *text,
                      "'");
    env.host_devices = static_cast<int>(count);
  }
  env.cpu_isa = read("TORCH_QUARTZ_CPU_ISA");
  TORCH_CHECK_VALUE(!env.cpu_isa || *env.cpu_isa == "avx2" || *env.cpu_isa == "avx512" || *env.cpu_isa == "avx512_bf16",
                    "quartz: TORCH_QUARTZ_CPU_ISA must be 'avx2', 'avx512' or 'avx512_bf16', got '", *env.cpu_isa, "'");
  return env;
}

}  // namespace

const Environment& environment() {
  static const Environment env = read_all();
  return env;
}

}  // namespace quartz
