// What the kernels of the matrix product share: their parameters, and what happens to a sum before it is stored.
#pragma once

#include <algorithm>

#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/moe_tables.cuh"
#include "kernels/elementary.h"
#include "kernels/matmul_cuda.h"

namespace quartz::kernels::cuda {

// What a kernel gets besides its tensor maps.
struct Product {
  void* out;
  const void* bias;
  int64_t out_batch, out_row, bias_batch, bias_row;
  int m, n, batch;
  int k_blocks;              // of 64; the last may be partial
  int row_group;             // prefill: rows of tiles worked on together, so that both operands are read from the cache
  int x_batched, w_batched;  // 0: one matrix for every batch
  float alpha, beta;
  Activation activation;
  bool out_float, bias_float;
  bool plain;          // neither bias nor alpha
  bool pairs;          // two neighbours of a row can be stored at once, and n is even
  bool copy_stores;    // the copy engine can store whole tiles
  bool vector_stores;  // 8 neighbours of a row of 16-bit results can be stored at once, and n is a multiple of 8
  bool whole_blocks;   // k is a multiple of 64
  bool frozen_weights;
  const MoeTile* ranges;  // PrefillTile::kRaggedK: those of the k of each batch
};

// The start of a kernel that was launched early, by the thread that starts the copies. Weights that nothing in flight
// writes are copied before the kernels before this one have ended; others are only fetched into the L2 cache until
// then, which cannot give old values, and copied from there.
template <class Copy, class Prefetch>
QUARTZ_DEVICE void while_previous_kernel_runs(bool frozen_weights, const CUtensorMap& x_map, const Copy& copy_weights,
                                              const Prefetch& prefetch_weights) {
  if (frozen_weights)
    copy_weights();
  else
    prefetch_weights();
  prefetch_map(x_map);
  wait_for_previous_kernel();
  if (!frozen_weights) copy_weights();
}

inline Product product_of(const Matmul& a) {
  const auto out_bytes = size_of(a.out_dtype);
  const auto address = reinterpret_cast<uintptr_t>(a.out);
  Product p{};
  p.out = a.out;
  p.bias = a.bias;
  p.out_batch = a.out_batch;
  p.out_row = a.out_row;
  p.bias_batch = a.bias_batch;
  p.bias_row = a.bias_row;
  p.m = static_cast<int>(a.m);
  p.n = static_cast<int>(a.n);
  p.batch = static_cast<int>(a.batch);
  p.k_blocks = static_cast<int>((a.k + 63) / 64);
  p.x_batched = a.batch > 1 && a.x_batch != 0;
  p.w_batched = a.batch > 1 && a.w_batch != 0;
  p.alpha = a.alpha;
  p.beta = a.beta;
  p.activation = a.activation;
  p.out_float = a.out_dtype == DType::kFloat32;
  p.bias_float = a.bias_dtype == DType::kFloat32;
  const bool one_batch = a.batch == 1;
  p.plain = a.bias == nullptr && a.alpha == 1.0f;
  p.pairs = a.n % 2 == 0 && address % (2 * out_bytes) == 0 && a.out_row % 2 == 0 && (one_batch || a.out_batch % 2 == 0);
  const int64_t unit = 16 / out_bytes;
  p.copy_stores = address % 16 == 0 && a.out_row % unit == 0 && (one_batch || a.out_batch % unit == 0);
  p.vector_stores = p.copy_stores && !p.out_float && a.n % 8 == 0;
  p.whole_blocks = a.k % 64 == 0;
  p.frozen_weights = a.frozen_weights;
  return p;
}

QUARTZ_DEVICE float sigmoid_product(float v, float u) { return v / (1.0f + exp_f32(-u)); }
QUARTZ_DEVICE float activate(Activation activation, float v) {
  switch (activation) {
    case Activation::kRelu:
      return v < 0.0f ? 0.0f : v;  // NaN stays
    case Activation::kSilu:
      return sigmoid_product(v, v);
    case Activation::kGelu:
      return 0.5f * v * erfcf(v * -0x1.6a09e6p-1f);
    case Activation::kGeluTanh:
      return sigmoid_product(v, 0x1.988454p+0f * (v + 0.044715f * (v * v * v)));
    case Activation::kGeluQuick:
      return sigmoid_product(v, 1.702f * v);
    default:
      return v;
  }
}

// Element by element, for kernels that are not about speed. `T` is the type of x and w.
template <class T, bool kActivate>
class Row {
 public:
  QUARTZ_DEVICE Row(const Product& p, int64_t batch, int64_t row)
      : p_(p), out_(batch * p.out_batch + row * p.out_row), bias_(batch * p.bias_batch + row * p.bias_row) {}

  QUARTZ_DEVICE float finish(int64_t column, float sum) const {
    // A zero is +0: whether the chain was continued over zeros beyond k must not show.
    float v = __fmul_rn(p_.alpha, __fadd_rn(sum, 0.0f));
    if (p_.bias != nullptr) {
      const float bias = p_.bias_float ? static_cast<const float*>(p_.bias)[bias_ + column]
                                       : to_float(static_cast<const T*>(p_.bias)[bias_ + column]);
      v = __fadd_rn(v, __fmul_rn(p_.beta, bias));
    }
    if constexpr (kActivate) v = activate(p_.activation, v);
    return v;
  }
  QUARTZ_DEVICE void put(int64_t column, float sum) const {
    if (column >= p_.n) return;
    const float v = finish(column, sum);
    if (p_.out_float) {
      static_cast<float*>(p_.out)[out_ + column] = v;
    } else {
      const auto bits = static_cast<uint16_t>(pack<T>(v, v));
      static_cast<uint16_t*>(p_.out)[out_ + column] = bits;
    }
  }

 private:
  const Product& p_;
  int64_t out_, bias_;
};

// The sums of a warpgroup lie as wgmma leaves them: 64 rows from `m0`, kN columns from `n0`. Straight code runs once a
// tile, from a cold instruction cache: what is usual must be short, so every choice is made outside of the loops.
struct LaneRows {
  int row, column;  // of the tile: rows row and row + 8, columns column, column + 1, column + 8, ...
  QUARTZ_DEVICE LaneRows()
      : row(static_cast<int>(threadIdx.x >> 5 & 3) * 16 + static_cast<int>(threadIdx.x & 31) / 4),
        column(static_cast<int>(threadIdx.x & 3) * 2) {}
};

template <class Bias, int kN>
QUARTZ_DEVICE void add_bias(const Product& p, int batch, int m0, int n0, float (&d)[kN / 2]) {
  const LaneRows lane;
  const int left = p.n - n0 - lane.column;  // columns
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = min(m0 + lane.row + 8 * h, p.m - 1);
    const Bias* const bias =
        static_cast<const Bias*>(p.bias) + batch * p.bias_batch + row * p.bias_row + n0 + lane.column;
#pragma unroll
    for (int j = 0; j < kN / 4; ++j) {
      const int column = j / 2 * 8 + j % 2;
      float& v = d[j / 2 * 4 + 2 * h + j % 2];
      if (column < left) v = __fadd_rn(__fmul_rn(p.alpha, v), __fmul_rn(p.beta, to_float(bias[column])));
    }
  }
}

// alpha, bias and activation.
template <class T, int kN, bool kActivate>
QUARTZ_DEVICE void finish_sums(const Product& p, int batch, int m0, int n0, float (&d)[kN / 2]) {
  // A zero is +0: whether the chain was continued over zeros beyond k must not show.
#pragma unroll
  for (int j = 0; j < kN / 2; ++j) d[j] = __fadd_rn(d[j], 0.0f);
  if (!p.plain) {
    if (p.bias == nullptr) {
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) d[j] = __fmul_rn(p.alpha, d[j]);
    } else if (p.bias_float) {
      add_bias<float, kN>(p, batch, m0, n0, d);
    } else {
      add_bias<T, kN>(p, batch, m0, n0, d);
    }
  }
  if constexpr (kActivate) {
#pragma unroll
    for (int j = 0; j < kN / 2; ++j) d[j] = activate(p.activation, d[j]);
  }
}

// Straight from the registers; rows from `rows` on are not there.
template <class T, int kN>
QUARTZ_DEVICE void store_sums_directly(const Product& p, int batch, int m0, int rows, int n0,
                                       const float (&d)[kN / 2]) {
  const LaneRows lane;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = lane.row + 8 * h, n = p.n - n0 - lane.column;  // columns that are left
    if (row >= rows) continue;
    const int64_t at = batch * p.out_batch + int64_t{m0 + row} * p.out_row + n0 + lane.column;
    if (p.pairs && !p.out_float) {
      uint16_t* const out = static_cast<uint16_t*>(p.out) + at;
#pragma unroll
      for (int j = 0; j < kN / 8; ++j)
        if (8 * j < n) *reinterpret_cast<uint32_t*>(out + 8 * j) = pack<T>(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    } else if (p.out_float) {
      float* const out = static_cast<float*>(p.out) + at;
#pragma unroll
      for (int j = 0; j < kN / 4; ++j)
        if (j / 2 * 8 + j % 2 < n) out[j / 2 * 8 + j % 2] = d[j / 2 * 4 + 2 * h + j % 2];
    } else {
      uint16_t* const out = static_cast<uint16_t*>(p.out) + at;
#pragma unroll
      for (int j = 0; j < kN / 4; ++j) {
        const float v = d[j / 2 * 4 + 2 * h + j % 2];
        if (j / 2 * 8 + j % 2 < n) out[j / 2 * 8 + j % 2] = static_cast<uint16_t>(pack<T>(v, v));
      }
    }
  }
}

// The same where p.vector_stores, 16 bytes at a time: each warp turns its 16 rows in its own part of shared memory, of
// kTurnBytes<kN>, which nothing else uses any more.
template <int kN>
constexpr int kTurnBytes = 16 * (2 * kN + 16);

template <class T, int kN>
QUARTZ_DEVICE void store_sums_turned(const Product& p, int batch, int m0, int rows, int n0, const float (&d)[kN / 2],
                                     uint32_t part_of_warp) {
  constexpr int kPitch = 2 * kN + 16, kChunks = kN / 8;
  const int lane = threadIdx.x & 31, first_row = static_cast<int>(threadIdx.x >> 5 & 3) * 16;
#pragma unroll
  for (int j = 0; j + 1 < kChunks; j += 2) {
    const float* v = d + 4 * j;
    store_matrices(part_of_warp + (lane & 15) * kPitch + (j + (lane >> 4)) * 16, pack<T>(v[0], v[1]),
                   pack<T>(v[2], v[3]), pack<T>(v[4], v[5]), pack<T>(v[6], v[7]));
  }
  if constexpr (kChunks % 2 == 1) {
    const float* v = d + 4 * (kChunks - 1);
    const uint32_t to = part_of_warp + (lane >> 2) * kPitch + (kChunks - 1) * 16 + (lane & 3) * 4;
    store_shared(to, pack<T>(v[0], v[1]));
    store_shared(to + 8 * kPitch, pack<T>(v[2], v[3]));
  }
  __syncwarp();
  uint16_t* const out = static_cast<uint16_t*>(p.out) + batch * p.out_batch + int64_t{m0} * p.out_row + n0;
#pragma unroll 4
  for (int i = lane; i < 16 * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_row + row < rows && n0 + 8 * chunk < p.n)
      *reinterpret_cast<uint4*>(out + int64_t{first_row + row} * p.out_row + 8 * chunk) =
          load_shared<uint4>(part_of_warp + row * kPitch + chunk * 16);
  }
  __syncwarp();
}

}  // namespace quartz::kernels::cuda
