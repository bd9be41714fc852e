#include "kernels/selective_scan.h"

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {

void selective_scan(const SelectiveScan& a, const Parallel& parallel) {
  parallel.run(a.batch * a.channels, row_grain(a.length * a.states * 16, 16384), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) selective_scan_channel(a, row);
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
