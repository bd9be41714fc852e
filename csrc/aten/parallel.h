// PyTorch's thread pool, for the CPU kernels.
#pragma once

#include "kernels/parallel.h"

namespace quartz {

kernels::Parallel at_parallel();

}  // namespace quartz
