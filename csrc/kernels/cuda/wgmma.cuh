// wgmma: 64 x N x 16 products of 16-bit operands in shared memory, accumulated in fp32, by one warpgroup.
//
// The bits of an accumulator do not depend on N, on its place in the tile, or on which operand holds the weights
// (measured: facts of the prototype), which is what makes tiles a matter of speed alone.
#pragma once

#include <type_traits>

#include "kernels/cuda/hopper.cuh"

namespace quartz::kernels::cuda {

QUARTZ_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
QUARTZ_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
QUARTZ_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// How an operand lies in shared memory, in rows of 128 bytes with 128-byte swizzle.
enum class Major {
  kK,   // a row is 64 k of one m or n; 8 rows are 1024 bytes
  kMN,  // a row is 64 m or n of one k; tiles of 64 k (8 KB) follow each other for the next 64 m or n
};
// The descriptor of the first 16 k of a tile; add kStep for each next 16.
template <Major kMajor>
struct Operand;
template <>
struct Operand<Major::kK> {
  static constexpr uint64_t kStep = 32 >> 4;
  QUARTZ_DEVICE static uint64_t descriptor(uint32_t address) {
    return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62;
  }
};
template <>
struct Operand<Major::kMN> {
  static constexpr uint64_t kStep = 2048 >> 4;
  QUARTZ_DEVICE static uint64_t descriptor(uint32_t address) {
    return uint64_t{(address & 0x3ffff) >> 4} | uint64_t{8192 >> 4} << 16 | uint64_t{1024 >> 4} << 32 |
           uint64_t{1} << 62;
  }
};

// d = a b (accumulate = 0) or d + a b. Lane l of warp w holds in d[4 j + 2 h + e] the element of row
// 16 w + l / 4 + 8 h and column 8 j + 2 (l % 4) + e.
template <class T, int N, Major kA = Major::kK, Major kB = Major::kK>
struct Wgmma;

// The registers of the asm statement: lists of their numbers, and of the floats they are.
#define QUARTZ_REGISTERS_4 "%0, %1, %2, %3"
#define QUARTZ_REGISTERS_8 QUARTZ_REGISTERS_4 ", %4, %5, %6, %7"
#define QUARTZ_REGISTERS_12 QUARTZ_REGISTERS_8 ", %8, %9, %10, %11"
#define QUARTZ_REGISTERS_16 QUARTZ_REGISTERS_12 ", %12, %13, %14, %15"
#define QUARTZ_REGISTERS_20 QUARTZ_REGISTERS_16 ", %16, %17, %18, %19"
#define QUARTZ_REGISTERS_24 QUARTZ_REGISTERS_20 ", %20, %21, %22, %23"
#define QUARTZ_REGISTERS_28 QUARTZ_REGISTERS_24 ", %24, %25, %26, %27"
#define QUARTZ_REGISTERS_32 QUARTZ_REGISTERS_28 ", %28, %29, %30, %31"
#define QUARTZ_REGISTERS_36 QUARTZ_REGISTERS_32 ", %32, %33, %34, %35"
#define QUARTZ_REGISTERS_40 QUARTZ_REGISTERS_36 ", %36, %37, %38, %39"
#define QUARTZ_REGISTERS_44 QUARTZ_REGISTERS_40 ", %40, %41, %42, %43"
#define QUARTZ_REGISTERS_48 QUARTZ_REGISTERS_44 ", %44, %45, %46, %47"
#define QUARTZ_REGISTERS_52 QUARTZ_REGISTERS_48 ", %48, %49, %50, %51"
#define QUARTZ_REGISTERS_56 QUARTZ_REGISTERS_52 ", %52, %53, %54, %55"
#define QUARTZ_REGISTERS_60 QUARTZ_REGISTERS_56 ", %56, %57, %58, %59"
#define QUARTZ_REGISTERS_64 QUARTZ_REGISTERS_60 ", %60, %61, %62, %63"
#define QUARTZ_REGISTERS_68 QUARTZ_REGISTERS_64 ", %64, %65, %66, %67"
#define QUARTZ_REGISTERS_72 QUARTZ_REGISTERS_68 ", %68, %69, %70, %71"
#define QUARTZ_REGISTERS_76 QUARTZ_REGISTERS_72 ", %72, %73, %74, %75"
#define QUARTZ_REGISTERS_80 QUARTZ_REGISTERS_76 ", %76, %77, %78, %79"
#define QUARTZ_REGISTERS_84 QUARTZ_REGISTERS_80 ", %80, %81, %82, %83"
#define QUARTZ_REGISTERS_88 QUARTZ_REGISTERS_84 ", %84, %85, %86, %87"
#define QUARTZ_REGISTERS_92 QUARTZ_REGISTERS_88 ", %88, %89, %90, %91"
#define QUARTZ_REGISTERS_96 QUARTZ_REGISTERS_92 ", %92, %93, %94, %95"
#define QUARTZ_REGISTERS_100 QUARTZ_REGISTERS_96 ", %96, %97, %98, %99"
#define QUARTZ_REGISTERS_104 QUARTZ_REGISTERS_100 ", %100, %101, %102, %103"
#define QUARTZ_REGISTERS_108 QUARTZ_REGISTERS_104 ", %104, %105, %106, %107"
#define QUARTZ_REGISTERS_112 QUARTZ_REGISTERS_108 ", %108, %109, %110, %111"
#define QUARTZ_REGISTERS_116 QUARTZ_REGISTERS_112 ", %112, %113, %114, %115"
#define QUARTZ_REGISTERS_120 QUARTZ_REGISTERS_116 ", %116, %117, %118, %119"
#define QUARTZ_REGISTERS_124 QUARTZ_REGISTERS_120 ", %120, %121, %122, %123"
#define QUARTZ_REGISTERS_128 QUARTZ_REGISTERS_124 ", %124, %125, %126, %127"
#define QUARTZ_FLOATS(I) "+f"(d[I]), "+f"(d[(I) + 1]), "+f"(d[(I) + 2]), "+f"(d[(I) + 3])
#define QUARTZ_FLOATS_4 QUARTZ_FLOATS(0)
#define QUARTZ_FLOATS_8 QUARTZ_FLOATS_4, QUARTZ_FLOATS(4)
#define QUARTZ_FLOATS_12 QUARTZ_FLOATS_8, QUARTZ_FLOATS(8)
#define QUARTZ_FLOATS_16 QUARTZ_FLOATS_12, QUARTZ_FLOATS(12)
#define QUARTZ_FLOATS_20 QUARTZ_FLOATS_16, QUARTZ_FLOATS(16)
#define QUARTZ_FLOATS_24 QUARTZ_FLOATS_20, QUARTZ_FLOATS(20)
#define QUARTZ_FLOATS_28 QUARTZ_FLOATS_24, QUARTZ_FLOATS(24)
#define QUARTZ_FLOATS_32 QUARTZ_FLOATS_28, QUARTZ_FLOATS(28)
#define QUARTZ_FLOATS_36 QUARTZ_FLOATS_32, QUARTZ_FLOATS(32)
#define QUARTZ_FLOATS_40 QUARTZ_FLOATS_36, QUARTZ_FLOATS(36)
#define QUARTZ_FLOATS_44 QUARTZ_FLOATS_40, QUARTZ_FLOATS(40)
#define QUARTZ_FLOATS_48 QUARTZ_FLOATS_44, QUARTZ_FLOATS(44)
#define QUARTZ_FLOATS_52 QUARTZ_FLOATS_48, QUARTZ_FLOATS(48)
#define QUARTZ_FLOATS_56 QUARTZ_FLOATS_52, QUARTZ_FLOATS(52)
#define QUARTZ_FLOATS_60 QUARTZ_FLOATS_56, QUARTZ_FLOATS(56)
#define QUARTZ_FLOATS_64 QUARTZ_FLOATS_60, QUARTZ_FLOATS(60)
#define QUARTZ_FLOATS_68 QUARTZ_FLOATS_64, QUARTZ_FLOATS(64)
#define QUARTZ_FLOATS_72 QUARTZ_FLOATS_68, QUARTZ_FLOATS(68)
#define QUARTZ_FLOATS_76 QUARTZ_FLOATS_72, QUARTZ_FLOATS(72)
#define QUARTZ_FLOATS_80 QUARTZ_FLOATS_76, QUARTZ_FLOATS(76)
#define QUARTZ_FLOATS_84 QUARTZ_FLOATS_80, QUARTZ_FLOATS(80)
#define QUARTZ_FLOATS_88 QUARTZ_FLOATS_84, QUARTZ_FLOATS(84)
#define QUARTZ_FLOATS_92 QUARTZ_FLOATS_88, QUARTZ_FLOATS(88)
#define QUARTZ_FLOATS_96 QUARTZ_FLOATS_92, QUARTZ_FLOATS(92)
#define QUARTZ_FLOATS_100 QUARTZ_FLOATS_96, QUARTZ_FLOATS(96)
#define QUARTZ_FLOATS_104 QUARTZ_FLOATS_100, QUARTZ_FLOATS(100)
#define QUARTZ_FLOATS_108 QUARTZ_FLOATS_104, QUARTZ_FLOATS(104)
#define QUARTZ_FLOATS_112 QUARTZ_FLOATS_108, QUARTZ_FLOATS(108)
#define QUARTZ_FLOATS_116 QUARTZ_FLOATS_112, QUARTZ_FLOATS(112)
#define QUARTZ_FLOATS_120 QUARTZ_FLOATS_116, QUARTZ_FLOATS(116)
#define QUARTZ_FLOATS_124 QUARTZ_FLOATS_120, QUARTZ_FLOATS(120)
#define QUARTZ_FLOATS_128 QUARTZ_FLOATS_124, QUARTZ_FLOATS(124)

// A, B, P, TA, TB are the numbers of the operands that follow the R = N / 2 accumulators.
#define QUARTZ_WGMMA_ASM(N, TYPE, R, A, B, P, TA, TB)                                                             \
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               " {" QUARTZ_REGISTERS_##R "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";}"                     \
               : QUARTZ_FLOATS_##R                                                                                \
               : "l"(a), "l"(b), "r"(accumulate), "n"(kA == Major::kMN), "n"(kB == Major::kMN))
#define QUARTZ_WGMMA(N, R, A, B, P, TA, TB)                                                    \
  template <class T, Major kA, Major kB>                                                       \
  struct Wgmma<T, N, kA, kB> {                                                                 \
    QUARTZ_DEVICE static void run(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) { \
      if constexpr (std::is_same_v<T, BFloat16>)                                               \
        QUARTZ_WGMMA_ASM(N, "bf16.bf16", R, A, B, P, TA, TB);                                  \
      else                                                                                     \
        QUARTZ_WGMMA_ASM(N, "f16.f16", R, A, B, P, TA, TB);                                    \
    }                                                                                          \
  };

QUARTZ_WGMMA(8, 4, 4, 5, 6, 7, 8)
QUARTZ_WGMMA(16, 8, 8, 9, 10, 11, 12)
QUARTZ_WGMMA(24, 12, 12, 13, 14, 15, 16)
QUARTZ_WGMMA(32, 16, 16, 17, 18, 19, 20)
QUARTZ_WGMMA(40, 20, 20, 21, 22, 23, 24)
QUARTZ_WGMMA(48, 24, 24, 25, 26, 27, 28)
QUARTZ_WGMMA(64, 32, 32, 33, 34, 35, 36)
QUARTZ_WGMMA(80, 40, 40, 41, 42, 43, 44)
QUARTZ_WGMMA(96, 48, 48, 49, 50, 51, 52)
QUARTZ_WGMMA(128, 64, 64, 65, 66, 67, 68)
QUARTZ_WGMMA(160, 80, 80, 81, 82, 83, 84)
QUARTZ_WGMMA(192, 96, 96, 97, 98, 99, 100)
QUARTZ_WGMMA(224, 112, 112, 113, 114, 115, 116)
QUARTZ_WGMMA(256, 128, 128, 129, 130, 131, 132)
#undef QUARTZ_WGMMA
#undef QUARTZ_WGMMA_ASM

// The same with a in registers: lane l of warp w holds rows 16 w + l / 4 and + 8 of k = 2 (l % 4), + 1 and of those +
// 8, as ldmatrix brings them. The registers may not change before the group is waited for.
template <class T, int N>
struct WgmmaFromRegisters;

#define QUARTZ_WGMMA_ASM(N, TYPE, R, A0, A1, A2, A3, B, P)                                                        \
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
               " {" QUARTZ_REGISTERS_##R "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, 0;}"     \
               : QUARTZ_FLOATS_##R                                                                                \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define QUARTZ_WGMMA(N, R, A0, A1, A2, A3, B, P)                                                           \
  template <class T>                                                                                       \
  struct WgmmaFromRegisters<T, N> {                                                                        \
    QUARTZ_DEVICE static void run(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
      if constexpr (std::is_same_v<T, BFloat16>)                                                           \
        QUARTZ_WGMMA_ASM(N, "bf16.bf16", R, A0, A1, A2, A3, B, P);                                         \
      else                                                                                                 \
        QUARTZ_WGMMA_ASM(N, "f16.f16", R, A0, A1, A2, A3, B, P);                                           \
    }                                                                                                      \
  };

QUARTZ_WGMMA(16, 8, 8, 9, 10, 11, 12, 13)
QUARTZ_WGMMA(32, 16, 16, 17, 18, 19, 20, 21)
QUARTZ_WGMMA(48, 24, 24, 25, 26, 27, 28, 29)
QUARTZ_WGMMA(64, 32, 32, 33, 34, 35, 36, 37)
QUARTZ_WGMMA(96, 48, 48, 49, 50, 51, 52, 53)
QUARTZ_WGMMA(128, 64, 64, 65, 66, 67, 68, 69)
#undef QUARTZ_WGMMA
#undef QUARTZ_WGMMA_ASM
#undef QUARTZ_FLOATS

// Two warpgroups that multiply in step would also store in step, with nothing to multiply meanwhile. The second starts
// its first tile kSkew blocks after the first one, and they stay apart by that: stores of one run under products of the
// other. Called before each block of k of a warpgroup's first tile.
template <int kSkew>
QUARTZ_DEVICE void skew_warpgroups(int group, int block, int blocks) {
  constexpr int kBarrier = 3;
  if constexpr (kSkew == 0) return;
  if (group == 0 && block == min(kSkew, blocks - 1)) named_barrier_arrive(kBarrier, 256);
  if (group == 1 && block == 0) named_barrier(kBarrier, 256);
}

}  // namespace quartz::kernels::cuda
