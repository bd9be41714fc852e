// A CUDA graph behind PyTorch's device-independent graph interface. torch 2.12 and newer.
#pragma once

#include <ATen/core/GraphImplInterface.h>

#include <memory>

namespace quartz {

std::unique_ptr<at::GraphImplInterface> create_cuda_graph(at::GraphImplArgs args);

}  // namespace quartz
