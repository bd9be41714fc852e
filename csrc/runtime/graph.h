// Graphs of quartz devices: CUDA graphs on cuda, recorded calls on host. torch.accelerator.Graph of torch 2.12 and
// newer.
#pragma once

namespace quartz {

// Registers what torch.accelerator.Graph constructs and, on host, what captures need.
void register_graphs();

}  // namespace quartz
