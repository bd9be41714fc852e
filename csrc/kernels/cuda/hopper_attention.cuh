// Hopper's instructions beyond hopper.cuh that attention uses.
#pragma once

#include "kernels/cuda/hopper.cuh"

namespace quartz::kernels::cuda::attention_kernels {

// Copies a box of a 4-dimensional tensor into shared memory; the barrier counts its bytes.
QUARTZ_DEVICE void copy_box(uint32_t target, const CUtensorMap& map, int c0, int c1, int c2, int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4,%5}], [%6];" ::
          "r"(target),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

QUARTZ_DEVICE void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
QUARTZ_DEVICE void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
QUARTZ_DEVICE void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler must not move uses of accumulators before the wait.
template <int N>
QUARTZ_DEVICE void pin(float (&registers)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

QUARTZ_DEVICE void arrive_named_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace quartz::kernels::cuda::attention_kernels
