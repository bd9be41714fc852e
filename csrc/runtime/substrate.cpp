#include "runtime/substrate.h"

#if QUARTZ_WITH_CUDA
#include "runtime/process_cuda.h"
#endif
#include "runtime/environment.h"

namespace quartz {
namespace {

struct Choice {
  const Substrate* substrate;
  std::string reason;
};

Choice choose() {
  const auto& wanted = environment().substrate;
  if (wanted == "host") return {&host_substrate(), "TORCH_QUARTZ_SUBSTRATE=host asks for it"};
#if QUARTZ_WITH_CUDA
  const std::string unavailable = cuda_unavailable_reason();
  if (unavailable.empty()) {
    return {&cuda_substrate(), wanted ? "TORCH_QUARTZ_SUBSTRATE=cuda asks for it" : "a CUDA device is present"};
  }
  TORCH_CHECK(!wanted, "quartz: TORCH_QUARTZ_SUBSTRATE=cuda, but ", unavailable);
  return {&host_substrate(), unavailable + ", so quartz falls back to host memory"};
#else
  TORCH_CHECK(!wanted, "quartz: TORCH_QUARTZ_SUBSTRATE=cuda, but this build of torch_quartz has no CUDA half (built ",
              "against a CPU build of torch, without nvcc, or with TORCH_QUARTZ_CUDA=0)");
  return {&host_substrate(), "this build of torch_quartz has no CUDA half"};
#endif
}

const Choice& choice() {
  static const Choice* chosen = new Choice(choose());
  return *chosen;
}

}  // namespace

const Substrate& substrate() {
  static const Substrate& chosen = *choice().substrate;
  return chosen;
}

const std::string& substrate_reason() { return choice().reason; }

}  // namespace quartz
