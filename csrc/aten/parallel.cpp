#include "aten/parallel.h"

#include <ATen/Parallel.h>

namespace quartz {

kernels::Parallel at_parallel() {
  return {at::in_parallel_region() ? 1 : at::get_num_threads(),
          [](int64_t count, int64_t grain, kernels::RangeTask task) {
            at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { task(begin, end); });
          }};
}

}  // namespace quartz
