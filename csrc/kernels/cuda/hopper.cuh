// The instructions of Hopper (sm_90a) that the tile kernels use, one thin function each: mbarriers, tensor copies
// (TMA), clusters, programmatic dependent launch, stmatrix. wgmma is in wgmma.cuh. The PTX is written here rather than
// taken from CUTLASS: some 200 lines serve every kernel, and the header costs no compile time.
//
// Addresses in shared memory are 32-bit, as the instructions take them (see `shared_address`).
#pragma once

#include <cuda.h>  // CUtensorMap
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/dtype.h"

#define QUARTZ_DEVICE __device__ __forceinline__

namespace quartz::kernels::cuda {

constexpr int kSharedBytes = 232448;  // what one block may have on sm_90
constexpr int kSwizzleRow = 128;      // bytes of a row of a swizzled tile: 64 elements of 16 bits

QUARTZ_DEVICE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// The dynamic shared memory from its first multiple of 1024 bytes, which 128-byte swizzled tiles need.
QUARTZ_DEVICE uint8_t* aligned_shared() {
  extern __shared__ uint8_t dynamic_shared[];
  return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(dynamic_shared) + 1023) & ~uintptr_t{1023});
}

// ---- mbarriers ----------------------------------------------------------------------------------------------------
QUARTZ_DEVICE void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After all barrier_init of a block, before its __syncthreads: other blocks and the copy engine see them.
QUARTZ_DEVICE void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
QUARTZ_DEVICE void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
QUARTZ_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of the same address in block `rank` of the cluster.
QUARTZ_DEVICE void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Until the phase of that parity is complete. A barrier starts in phase 0: waiting for parity 1 returns at once.
QUARTZ_DEVICE void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra AGAIN;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The barriers of a ring of stages: `full` (bytes have come), `empty` (they have been used).
struct Ring {
  uint32_t full, empty;  // addresses of the first of each
  int stages, stage = 0;
  uint32_t parity = 0;

  QUARTZ_DEVICE Ring(uint32_t barriers, int n) : full(barriers), empty(barriers + 8 * n), stages(n) {}
  QUARTZ_DEVICE void init(uint32_t empty_arrivals) const {
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, empty_arrivals);
    }
    barrier_init_done();
  }
  QUARTZ_DEVICE uint32_t full_barrier() const { return full + 8 * stage; }
  QUARTZ_DEVICE uint32_t empty_barrier() const { return empty + 8 * stage; }
  QUARTZ_DEVICE void next() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- tensor copies ------------------------------------------------------------------------------------------------
QUARTZ_DEVICE uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
QUARTZ_DEVICE uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
QUARTZ_DEVICE void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Global to shared. Coordinates are those of the box's first element, innermost first; what lies outside is zero.
QUARTZ_DEVICE void copy_3d(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4}], [%5];" ::"r"(
          to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}
QUARTZ_DEVICE void copy_3d(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, uint32_t barrier,
                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2,%3,%4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
      : "memory");
}
QUARTZ_DEVICE void copy_4d(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, int c3, uint32_t barrier,
                           uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2,%3,%4,%5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}
// Global to the L2 cache, nothing else. L2 is where the writes of all multiprocessors meet, so this may run before the
// kernels in flight have written what it fetches.
QUARTZ_DEVICE void prefetch_3d(const CUtensorMap& map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1,%2,%3}];" ::"l"(&map), "r"(c0), "r"(c1),
               "r"(c2)
               : "memory");
}
QUARTZ_DEVICE void prefetch_4d(const CUtensorMap& map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1,%2,%3,%4}];" ::"l"(&map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}
// To the same address, and that of the barrier, in every block of the cluster whose bit is set in `blocks`.
QUARTZ_DEVICE void multicast_3d(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, uint32_t barrier,
                                uint64_t policy, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2,%3,%4}], [%5], %6, %7;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(blocks), "l"(policy)
      : "memory");
}
// Shared to global, what lies outside is not written; finished by commit_stores and wait_stores_read.
QUARTZ_DEVICE void store_3d(const CUtensorMap& map, int c0, int c1, int c2, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1,%2,%3}], [%4];" ::"l"(&map), "r"(c0),
               "r"(c1), "r"(c2), "r"(from)
               : "memory");
}
QUARTZ_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
QUARTZ_DEVICE void wait_stores_read() {  // all but the last kPending groups have been read from shared memory
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Writes of this thread to shared memory become visible to the copy engine and to wgmma.
QUARTZ_DEVICE void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- blocks, warps, clusters --------------------------------------------------------------------------------------
QUARTZ_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QUARTZ_DEVICE void named_barrier_arrive(int id, int threads) {  // without waiting
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
QUARTZ_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
QUARTZ_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <int kRegisters>
QUARTZ_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
QUARTZ_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- programmatic dependent launch --------------------------------------------------------------------------------
// Until the kernels before this one in the stream are complete and their writes visible. Every kernel that is launched
// with the attribute must call it in each block, or the next one could start before the last but one has ended.
QUARTZ_DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
QUARTZ_DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- 16-bit results -----------------------------------------------------------------------------------------------
// Two floats rounded to the nearest, the first in the lower half.
template <class T>
QUARTZ_DEVICE uint32_t pack(float low, float high);
template <>
QUARTZ_DEVICE uint32_t pack<BFloat16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <>
QUARTZ_DEVICE uint32_t pack<Float16>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
// Four 8 x 8 matrices of 16 bits; lane i gives the address of row i % 8 of matrix i / 8.
QUARTZ_DEVICE void store_matrices(uint32_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}
// ---- shared memory by address -------------------------------------------------------------------------------------
QUARTZ_DEVICE void store_shared(uint32_t address, float first, float second) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(first), "f"(second) : "memory");
}
QUARTZ_DEVICE void store_shared(uint32_t address, uint32_t bits) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}
template <class T>
QUARTZ_DEVICE T load_shared(uint32_t address);
template <>
QUARTZ_DEVICE uint4 load_shared<uint4>(uint32_t address) {
  uint4 bits;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(address)
               : "memory");
  return bits;
}
template <>
QUARTZ_DEVICE uint32_t load_shared<uint32_t>(uint32_t address) {
  uint32_t bits;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
  return bits;
}
template <>
QUARTZ_DEVICE uint16_t load_shared<uint16_t>(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address) : "memory");
  return bits;
}

}  // namespace quartz::kernels::cuda
