// Tiles in shared memory: where they lie, the rings that bring them, and the products on them.
#pragma once

#include "kernels/attention_plan.h"
#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_wgmma.cuh"
#include "kernels/cuda/hopper_attention.cuh"

namespace quartz::kernels::cuda::attention_kernels {

constexpr int kTile = kAttentionTile;

// Shared memory of a block, in bytes.
template <int D, bool SPLIT>
struct Layout {
  static constexpr int kGroups = SPLIT ? 1 : 2;  // warpgroups of 64 rows
  static constexpr int kColumns = D / 64;        // boxes of 64 columns, 128 bytes wide
  static constexpr int kBoxBytes = kTile * 128;  // of keys or values
  static constexpr int kStageBytes = kColumns * kBoxBytes;
  static constexpr int kStages = D == 64 ? (SPLIT ? 5 : 4) : D == 128 ? 2 : 1;
  static constexpr int kQueryBytes = kGroups * 64 * D * 2;
  static constexpr int kQueryBuffers = SPLIT && D < 256 ? 2 : 1;
  static constexpr int kItemBuffers = 4;                 // an item is read until its last result is written
  static constexpr bool kFoldShared = D < 256 || SPLIT;  // else in global memory
  static constexpr int kFoldBytes = kGroups * 64 * D * 4;
  static constexpr int kKeys = kQueryBuffers * kQueryBytes;
  static constexpr int kValues = kKeys + kStages * kStageBytes;
  static constexpr int kFold = kValues + kStages * kStageBytes;
  static constexpr int kBarriers = kFold + (kFoldShared ? kFoldBytes : 0);
  static constexpr int kItems = kBarriers + 16 * (2 * kStages + kQueryBuffers);
  static constexpr int kSize = kItems + 32 * kItemBuffers;
  static constexpr int kThreads = SPLIT ? 160 : 384;
  static_assert(kItems % 32 == 0 || kItems % 16 == 0);
  static_assert(kSize <= 232448, "shared memory of a block");
};

// A ring of buffers between producer and consumers: full[i] and empty[i] are mbarriers.
template <int STAGES>
struct Buffers {
  uint32_t full, empty;  // addresses of the first
  int stage = 0;
  uint32_t phase;
  QUARTZ_DEVICE Buffers(uint32_t barriers, uint32_t first_phase)
      : full(barriers), empty(barriers + 8 * STAGES), phase(first_phase) {}
  QUARTZ_DEVICE void wait_full() const { barrier_wait(full + 8 * stage, phase); }
  QUARTZ_DEVICE void wait_empty() const { barrier_wait(empty + 8 * stage, phase); }
  QUARTZ_DEVICE uint32_t full_barrier() const { return full + 8 * stage; }
  QUARTZ_DEVICE uint32_t empty_barrier() const { return empty + 8 * stage; }
  QUARTZ_DEVICE void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// Matrix descriptors, low words: rows of 64 elements (128 bytes); for the values, boxes of 64 columns 16384 bytes
// apart.
QUARTZ_DEVICE uint32_t row_descriptor(uint32_t address) { return ((address & 0x3ffff) >> 4) | (1u << 16); }
QUARTZ_DEVICE uint32_t value_descriptor(uint32_t address) { return ((address & 0x3ffff) >> 4) | (1024u << 16); }

template <class T, int D>
QUARTZ_DEVICE void scores(float (&s)[64], uint32_t q, uint32_t k) {
#pragma unroll
  for (int i = 0; i < D / 16; ++i) {
    const uint32_t at_q = q + (i % 4) * 2 + (i / 4) * 512, at_k = k + (i % 4) * 2 + (i / 4) * 1024;
    if (i == 0) {
      scores_first(T{}, s, at_q, at_k);
    } else {
      scores_step(T{}, s, at_q, at_k);
    }
  }
}

template <class T, int D>
QUARTZ_DEVICE void values(float (&o)[D / 2], const uint32_t (&p)[32], uint32_t v, int accumulate) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int keep = i > 0 || accumulate;
    if constexpr (D == 64) {
      values_step_64(T{}, o, p + 4 * i, v + i * 128, keep);
    } else {
#pragma unroll
      for (int half = 0; half < D / 128; ++half) {
        values_step_128(T{}, o + 64 * half, p + 4 * i, v + i * 128 + half * 2048, keep);
      }
    }
  }
}

// The first key that an item's rows may see.
QUARTZ_DEVICE int first_key(const AttentionItem& item, const Params& p) {
  return p.window > 0 ? max(0, item.position + 1 - p.window) : 0;
}

}  // namespace quartz::kernels::cuda::attention_kernels
