// The rows of the grouped products: which (token, slot) pair each is, and which rows of one expert make a tile.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/moe_cuda.h"

namespace quartz::kernels::cuda {

// The kernels of the layer start early (launch.h) and wait; the second product also fetches weights while it waits.
constexpr bool kMoeEarly = true;
constexpr int kMaxMoeExperts = 1024;
constexpr int kFewPairs = 64;  // up to here each block of the first product finds the order for itself

struct MoeTile {
  int expert, row, rows;  // rows of one expert from `row`
  // Tiles of one expert that lie beside each other are worked on together, so that its weights are read once: `place`
  // of `group` tiles.
  uint16_t place, group;
};

// In groups of at most `most`: tile i of an expert with `total` rows from `row`, in tiles of at most `cap`.
QUARTZ_DEVICE MoeTile moe_tile(int expert, int row, int total, int cap, int most, int i) {
  const int tiles = (total + cap - 1) / cap, place = i % most;
  return {expert, row + i * cap, min(cap, total - i * cap), static_cast<uint16_t>(place),
          static_cast<uint16_t>(min(most, tiles - (i - place)))};
}
// The t-th piece of work among all (tile, panel of columns): the tiles of a group for one panel follow each other.
struct MoeWork {
  MoeTile tile;
  int panel;
};
QUARTZ_DEVICE MoeWork moe_work(const MoeTile* tiles, int panels, int t) {
  const int row_tile = t / panels;
  const MoeTile any = tiles[row_tile];
  const int first = row_tile - any.place, local = t - first * panels;
  return {tiles[first + local % any.group], local / any.group};
}

// In the workspace. Rows are sorted by expert, inside one by pair; pairs of no expert have none.
struct MoeTables {
  int* counts;  // [0]: tiles of the first product, [1]: of the second, [2]: the next tile of the first (prefill)
  MoeTile *up_tiles, *down_tiles;
  int* row_of;           // [pairs]: -1 for a pair of no expert
  int* pair_of;          // [rows]
  int* counts_of_parts;  // [parts of kMoePart pairs][experts], only for more than kMoeOneBlock pairs
};
constexpr int kMoeTogether = 8;
constexpr int kMoePart = 2048, kMoeOneBlock = 2048;

// Rows of at most this many make a tile.
struct MoeCaps {
  int up, down;
  int group;  // tiles that are worked on together
};

// By one block, or for more than kMoeOneBlock pairs by three kernels.
void moe_order(const MoeExperts& a, const MoeTables& tables, MoeCaps caps);

// The same for up to kFewPairs pairs, in shared memory, by all threads of a block.
struct FewPairs {
  int ids[kFewPairs];
  int tiles_of[kFewPairs];  // of the expert of its first pair, else 0
  MoeTile tiles[kFewPairs];
  int pair_of[kFewPairs], row_of[kFewPairs];
  int tile_count;

  QUARTZ_DEVICE void order(const int64_t* given, int pairs, int experts, int cap) {
    const int p = threadIdx.x;
    if (p < pairs) ids[p] = given[p] >= 0 && given[p] < experts ? static_cast<int>(given[p]) : experts;
    if (p == 0) tile_count = 0;
    __syncthreads();
    int id = experts, row = 0, before = 0, same = 0;
    if (p < pairs) {
      id = ids[p];
      for (int q = 0; q < pairs; ++q) {
        const int other = ids[q];
        row += other < id || (other == id && q < p);
        before += other == id && q < p;
        same += other == id;
      }
      tiles_of[p] = before == 0 && id < experts ? (same + cap - 1) / cap : 0;
      if (id < experts) pair_of[row] = p;
      row_of[p] = id < experts ? row : -1;
    }
    __syncthreads();
    if (p < pairs && before == 0 && id < experts) {
      int tile = 0;
      for (int q = 0; q < pairs; ++q) tile += ids[q] < id ? tiles_of[q] : 0;
      for (int i = 0; i < tiles_of[p]; ++i) tiles[tile + i] = moe_tile(id, row, same, cap, 1, i);
      atomicAdd(&tile_count, tiles_of[p]);
    }
    __syncthreads();
  }
};

}  // namespace quartz::kernels::cuda
