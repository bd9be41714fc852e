#include "runtime/graph.h"

#include "runtime/graph_host.h"
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

class HostGraphImpl final : public at::GraphImplInterface {
 public:
  explicit HostGraphImpl(at::GraphImplArgs args) : graph_(args.keep_graph) {}

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    graph_.capture_begin(pool, mode == at::GraphCaptureMode::Relaxed ? CaptureMode::kRelaxed : CaptureMode::kStrict);
  }
  void capture_end() override { graph_.capture_end(); }
  void instantiate() override { graph_.instantiate(); }
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  at::MempoolId_t pool() const override { return graph_.pool(); }
  void enable_debug_mode() override {}  // debug_dump needs nothing that is not kept anyway
  void debug_dump(const std::string& path) override { graph_.debug_dump(path); }

 private:
  HostGraph graph_;
};

std::unique_ptr<at::GraphImplInterface> create_graph(at::GraphImplArgs args) {
#if QUARTZ_WITH_CUDA
  if (substrate().is_cuda()) return create_cuda_graph(args);
#endif
  return std::make_unique<HostGraphImpl>(args);
}

}  // namespace

void register_graphs() {
  if (!substrate().is_cuda()) register_host_graphs();
  // The registry is keyed by the device's name, "QUARTZ" once it is renamed.
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kQuartz, /*lower_case=*/false), create_graph, "torch_quartz",
                                    c10::REGISTRY_DEFAULT);
}

#else

void register_graphs() {
  if (!substrate().is_cuda()) register_host_graphs();
}

#endif

}  // namespace quartz
