// 16 bytes of codes of a row and the scales that cover them, to 16-bit numbers in the order of k.
#pragma once

#include "kernels/cuda/hopper.cuh"
#include "kernels/quantized_weight.h"

namespace quartz::kernels::cuda {

template <WeightFormat kFormat>
constexpr int kUnit = kFormat == WeightFormat::kFp8 ? 16 : 32;  // codes in 16 bytes

// Byte i of the result is byte (nibble i of the selector) % 8 of {low, high}; with bit 3 of the nibble its top bit
// eight times.
QUARTZ_DEVICE uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
  return bytes;
}

// Two e4m3 numbers, exactly, as float16: the first in the low half.
QUARTZ_DEVICE uint32_t halves_of_e4m3(uint32_t two_codes) {
  uint32_t bits;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(bits) : "h"(static_cast<uint16_t>(two_codes)));
  return bits;
}
QUARTZ_DEVICE float2 floats_of_halves(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

// The magnitudes of e2m1 times a scale, each rounded to T, as a table: byte i of low (high) is the low (high) byte of
// number i.
template <class T>
struct Fp4Table {
  uint32_t low[2], high[2];
  QUARTZ_DEVICE explicit Fp4Table(float scale) {
    const uint32_t a = pack<T>(0.0f * scale, 0.5f * scale), b = pack<T>(scale, 1.5f * scale);
    const uint32_t c = pack<T>(2.0f * scale, 3.0f * scale), d = pack<T>(4.0f * scale, 6.0f * scale);
    low[0] = permute_bytes(a, b, 0x6420);
    high[0] = permute_bytes(a, b, 0x7531);
    low[1] = permute_bytes(c, d, 0x6420);
    high[1] = permute_bytes(c, d, 0x7531);
  }
  // Eight codes to four words of two numbers.
  QUARTZ_DEVICE void look_up(uint32_t codes, uint32_t (&out)[4]) const {
    const uint32_t magnitudes = codes & 0x77777777u, shifted = codes << 4;
    // The top bits of the bytes are the signs of the odd codes; shifted, of the even ones.
    const uint32_t signs[2] = {permute_bytes(codes, shifted, 0x9d8c), permute_bytes(codes, shifted, 0xbfae)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t four = magnitudes >> (16 * i);
      const uint32_t lows = permute_bytes(low[0], low[1], four);
      const uint32_t highs = permute_bytes(high[0], high[1], four) | (signs[i] & 0x80808080u);
      out[2 * i] = permute_bytes(lows, highs, 0x5140);
      out[2 * i + 1] = permute_bytes(lows, highs, 0x7362);
    }
  }
};

// `scales`: NVFP4, two e4m3 numbers; MXFP4, one e8m0; fp8, the bits of a float, used if `scaled`.
template <class T, WeightFormat kFormat>
QUARTZ_DEVICE void decode_unit(const uint4& codes, uint32_t scales, bool scaled, uint32_t (&out)[kUnit<kFormat> / 2]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  if constexpr (kFormat == WeightFormat::kFp8) {
    const float scale = __uint_as_float(scales);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint32_t halves = halves_of_e4m3(words[i / 2] >> (16 * (i % 2)));
      if constexpr (sizeof(T) == 2 && std::is_same_v<T, Float16>) {
        if (!scaled) {
          out[i] = halves;
          continue;
        }
      }
      const float2 pair = floats_of_halves(halves);
      out[i] = scaled ? pack<T>(pair.x * scale, pair.y * scale) : pack<T>(pair.x, pair.y);
    }
  } else if constexpr (kFormat == WeightFormat::kNvFp4) {
    const float2 pair = floats_of_halves(halves_of_e4m3(scales));
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const Fp4Table<T> table(group == 0 ? pair.x : pair.y);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        table.look_up(words[2 * group + i], *reinterpret_cast<uint32_t(*)[4]>(out + 8 * group + 4 * i));
    }
  } else {
    const Fp4Table<T> table(e8m0_to_float(static_cast<uint8_t>(scales)));
#pragma unroll
    for (int i = 0; i < 4; ++i) table.look_up(words[i], *reinterpret_cast<uint32_t(*)[4]>(out + 4 * i));
  }
}

}  // namespace quartz::kernels::cuda
