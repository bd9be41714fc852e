#include "runtime/torch_version.h"

#if QUARTZ_TORCH_VERSION >= 212
#include "runtime/graph_cuda.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

namespace quartz {
namespace {

cudaStreamCaptureMode native_mode(at::GraphCaptureMode mode) {
  switch (mode) {
    case at::GraphCaptureMode::ThreadLocal:
      return cudaStreamCaptureModeThreadLocal;
    case at::GraphCaptureMode::Relaxed:
      return cudaStreamCaptureModeRelaxed;
    default:  // what torch.cuda.graph takes when it is not told
      return cudaStreamCaptureModeGlobal;
  }
}

class CudaGraph final : public at::GraphImplInterface {
 public:
  explicit CudaGraph(at::GraphImplArgs args) : graph_(args.keep_graph) {}

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    graph_.capture_begin(pool, native_mode(mode));
  }
  void capture_end() override { graph_.capture_end(); }
  void instantiate() override { graph_.instantiate(); }
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  at::MempoolId_t pool() const override { return graph_.pool(); }
  void enable_debug_mode() override { graph_.enable_debug_mode(); }
  void debug_dump(const std::string& path) override {
    C10_CUDA_CHECK(cudaGraphDebugDotPrint(graph_.raw_cuda_graph(), path.c_str(), cudaGraphDebugDotFlagsVerbose));
  }

 private:
  mutable at::cuda::CUDAGraph graph_;  // its pool() is not const
};

}  // namespace

std::unique_ptr<at::GraphImplInterface> create_cuda_graph(at::GraphImplArgs args) {
  return std::make_unique<CudaGraph>(args);
}

}  // namespace quartz
#endif
