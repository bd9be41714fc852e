// torch.accelerator.Graph for quartz. torch 2.12 and newer.
#pragma once

namespace quartz {

// Registers what torch.accelerator.Graph constructs: on cuda a CUDA graph, on host an error.
void register_graphs();

}  // namespace quartz
