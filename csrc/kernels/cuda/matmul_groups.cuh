// Which part of a product, or of a product of groups, a block of the general kernels computes.
#pragma once

#include "kernels/cuda/matmul_tiles.cuh"
#include "kernels/cuda/moe_tables.cuh"
#include "kernels/ragged.h"

namespace quartz::kernels::cuda {

struct Groups {
  Ragged ragged = Ragged::kNone;
  const MoeTile* tiles = nullptr;  // kM, kN: tiles of that dimension; kK: the range of each group
  const int* count = nullptr;      // of tiles
};

// The most tiles of `cap` that `groups` groups of `size` elements together can make.
inline int64_t most_tiles(int64_t size, int64_t groups, int64_t cap) { return size / cap + groups; }

struct Part {
  int64_t m, n;          // of the first element
  int64_t m_end, n_end;  // none beyond
  int64_t batch;         // of the output
};

// x and w become what the part reads. False: there is nothing for this block.
template <int kM, int kN, class Strides>
QUARTZ_DEVICE bool part_of_block(const Product& p, const Groups& groups, Strides& x, Strides& w, Part& part) {
  const bool by_m = groups.ragged == Ragged::kM, by_n = groups.ragged == Ragged::kN;
  const int64_t m_tiles = by_m ? p.m / kM + p.batch : (p.m + kM - 1) / kM,
                n_tiles = by_n ? p.n / kN + p.batch : (p.n + kN - 1) / kN;
  const int64_t m_tile = blockIdx.x % m_tiles, n_tile = blockIdx.x / m_tiles % n_tiles;
  part = {m_tile * kM, n_tile * kN, p.m, p.n, blockIdx.x / (m_tiles * n_tiles)};
  if (by_m || by_n) {
    const int64_t at = by_m ? m_tile : n_tile;
    if (at >= *groups.count) return false;
    const MoeTile tile = groups.tiles[at];
    (by_m ? part.m : part.n) = tile.row;
    (by_m ? part.m_end : part.n_end) = tile.row + tile.rows;
    (by_m ? w : x).data += int64_t{tile.expert} * (by_m ? w : x).batch;
    part.batch = 0;
    return true;
  }
  if (groups.ragged == Ragged::kK) {
    const MoeTile range = groups.tiles[part.batch];
    x.data += int64_t{range.row} * x.column;
    w.data += int64_t{range.row} * w.column;
    x.k = w.k = range.rows;
    return true;
  }
  x.data += part.batch * x.batch;
  w.data += part.batch * w.batch;
  return true;
}

// Blocks of that division.
inline int64_t parts(const Matmul& a, Ragged ragged, int64_t m, int64_t n) {
  const int64_t m_tiles = ragged == Ragged::kM ? most_tiles(a.m, a.batch, m) : (a.m + m - 1) / m;
  const int64_t n_tiles = ragged == Ragged::kN ? most_tiles(a.n, a.batch, n) : (a.n + n - 1) / n;
  return m_tiles * n_tiles * (ragged == Ragged::kM || ragged == Ragged::kN ? 1 : a.batch);
}

}  // namespace quartz::kernels::cuda
