#include "kernels/spec_verify.h"

namespace quartz::kernels::QUARTZ_ISA {

void spec_verify(const SpecVerify& a, const Parallel& parallel) {
  parallel.run(a.requests, 256, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) spec_verify_request(a, r);
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
