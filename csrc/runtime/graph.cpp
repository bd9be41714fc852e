#include "runtime/graph.h"

#include "runtime/substrate.h"
#include "runtime/torch_version.h"

#if QUARTZ_TORCH_VERSION >= 212
#include <ATen/core/GraphImplInterface.h>

#if QUARTZ_WITH_CUDA
#include "runtime/graph_cuda.h"
#endif
#endif

namespace quartz {

#if QUARTZ_TORCH_VERSION >= 212

namespace {

std::unique_ptr<at::GraphImplInterface> create_graph([[maybe_unused]] at::GraphImplArgs args) {
#if QUARTZ_WITH_CUDA
  if (substrate().is_cuda()) return create_cuda_graph(args);
#endif
  TORCH_CHECK(
      false,
      "torch.accelerator.Graph needs the cuda substrate on quartz: graphs are CUDA graphs, and this process runs ",
      "on host");
}

}  // namespace

void register_graphs() {
  // The registry is keyed by the device's name, "QUARTZ" once it is renamed.
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kQuartz, /*lower_case=*/false), create_graph, "torch_quartz",
                                    c10::REGISTRY_DEFAULT);
}

#else

void register_graphs() {}

#endif

}  // namespace quartz
