// The sum over a token's experts: fused multiply-adds in float from +0, in ascending order of row, one rounding.
#pragma once

#include "kernels/cuda/hopper.cuh"

namespace quartz::kernels::cuda {

// Eight neighbouring columns of one token.
template <class T>
struct WeightedSum {
  float sums[8] = {};

  QUARTZ_DEVICE void add(float factor, const uint4& bits) {
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      sums[2 * q] = __fmaf_rn(factor, to_float(T{static_cast<uint16_t>(words[q])}), sums[2 * q]);
      sums[2 * q + 1] = __fmaf_rn(factor, to_float(T{static_cast<uint16_t>(words[q] >> 16)}), sums[2 * q + 1]);
    }
  }
  QUARTZ_DEVICE uint4 rounded() const {
    return make_uint4(pack<T>(sums[0], sums[1]), pack<T>(sums[2], sums[3]), pack<T>(sums[4], sums[5]),
                      pack<T>(sums[6], sums[7]));
  }
};

}  // namespace quartz::kernels::cuda
