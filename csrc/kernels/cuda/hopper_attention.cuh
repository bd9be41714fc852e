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

// The same to the same address, and that of the barrier, in both blocks of a cluster of two.
QUARTZ_DEVICE void copy_box_to_both(uint32_t target, const CUtensorMap& map, int c0, int c1, int c2, int c3,
                                    uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%2,%3,%4,%5}], [%6], %7;" ::"r"(target),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}

// Stores a word at the same address in block `rank` of the cluster, whose barrier counts its 4 bytes.
QUARTZ_DEVICE void send_word(uint32_t address, uint32_t word, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 to, at;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 at, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %1, [at];}" ::"r"(address),
      "r"(word), "r"(barrier), "r"(rank)
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

// d += a b by one warp: 16 x 16 times 16 x 8, of the fragments that a row block of wgmma has.
QUARTZ_DEVICE void product_16x8(BFloat16, float (&d)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
QUARTZ_DEVICE void product_16x8(Float16, float (&d)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The exponent bits of two numbers in a word, and a one in their last place: (x & bits) + ones has the uppermost bit of
// a half set if and only if that number is infinite or NaN.
template <class T>
constexpr uint32_t kExponents = 0x7f807f80;
template <class T>
constexpr uint32_t kExponentUnits = 0x00800080;
template <>
constexpr uint32_t kExponents<Float16> = 0x7c007c00;
template <>
constexpr uint32_t kExponentUnits<Float16> = 0x04000400;

QUARTZ_DEVICE void load_shared_16(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

// Whether any thread of a named barrier says so.
QUARTZ_DEVICE bool any_of_barrier(int id, int threads, bool mine) {
  int any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.b32 p, %1, 0; barrier.cta.red.or.aligned.pred q, %2, %3, p; selp.b32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(static_cast<int>(mine)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

QUARTZ_DEVICE void arrive_named_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace quartz::kernels::cuda::attention_kernels
