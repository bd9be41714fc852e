// Rows of a quantised weight, decoded (quantized_weight.h): `decoded` of 16 elements at a time, rounded to T. Subnormal
// numbers are kept, so the modes of the processor must be those of the standard.
#pragma once

#include <type_traits>

#include "kernels/cpu/simd.h"
#include "kernels/quantized_weight.h"

namespace quartz::kernels::QUARTZ_ISA {

// 16 bytes, each as an integer of a lane.
struct Bytes16 {
  IVec part[16 / kLanes];
};
QUARTZ_INLINE Bytes16 widen(__m128i bytes) {
#if defined(__AVX512F__)
  return {{_mm512_cvtepu8_epi32(bytes)}};
#else
  return {{_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))}};
#endif
}

QUARTZ_INLINE Vec e2m1_values(IVec codes) {  // of 0 to 15
#if defined(__AVX512F__)
  const Vec table = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                   -3.0f, -4.0f, -6.0f);
  return _mm512_permutexvar_ps(codes, table);
#else
  const Vec table = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
  const Vec sign = as_float(shift_left<28>(bit_and(codes, broadcast_int(8))));
  return _mm256_or_ps(sign, _mm256_permutevar8x32_ps(table, codes));  // by the lower three bits
#endif
}

QUARTZ_INLINE Vec e4m3_values(IVec codes) {  // of 0 to 255: as e4m3_to_float
  const IVec sign = shift_left<24>(bit_and(codes, broadcast_int(0x80)));
  const IVec magnitude = shift_left<20>(bit_and(codes, broadcast_int(0x7f)));
  const Vec value = mul(as_float(magnitude), broadcast(0x1p+120f));
  const Mask nan = equal(value, broadcast(480.0f));  // what 0x7f would be
  return as_float(add(sign, as_int(select(nan, broadcast(float_of_bits(0x7fc00000u)), value))));
}

// 16 codes of four bits, the first in the low half of the first byte.
QUARTZ_INLINE __m128i nibbles(const uint8_t* bytes) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)), low = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(eight, low), _mm_and_si128(_mm_srli_epi16(eight, 4), low));
}

// Rounded to T; kExact: the value is one of T already.
template <bool kExact, class T>
QUARTZ_INLINE void put16(T* to, const Vec16& value, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (kExact && std::is_same_v<T, BFloat16>) {
    if (count >= 16) {
      const __m256i bits = _mm512_cvtepi32_epi16(_mm512_srli_epi32(as_int(value.part[0]), 16));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
      return;
    }
  }
#endif
  store16(to, value, count);
}

#if defined(__AVX512F__)
// 32 codes whose first 16 have one scale and the last 16 another, as bfloat16, which holds the products exactly.
QUARTZ_INLINE void put32(BFloat16* to, const uint8_t* codes, float first, float second) {
  const auto table = [](float scale) {
    const Vec values =
        mul(e2m1_values(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)), broadcast(scale));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(as_int(values), 16));
  };
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(table(first)), table(second), 1);
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)), low = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, low), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), low);
  const __m256i four_bits = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(even, odd)),
                                                    _mm_or_si128(_mm_unpackhi_epi8(even, odd), _mm_set1_epi8(16)), 1);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(four_bits), both));
}
#endif

// Elements [k, k + count) of row n of a matrix of the stack; k is a multiple of 256.
template <WeightFormat kFormat, class T>
void decode_row_as(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, int64_t count, T* to) {
  constexpr bool kFp8 = kFormat == WeightFormat::kFp8;
  const uint8_t* codes = w.codes + batch * w.codes_batch + n * w.codes_row + (kFp8 ? k : k / 2);
  const int64_t scales_at = batch * w.scales_batch + n / w.block_rows * w.scales_row;
  const auto put_codes = [&](int64_t i, const uint8_t* from, int64_t left, const auto& finish) {
    alignas(16) uint8_t tail[16] = {};
    if (left < 16) {  // nothing is read beyond the row
      memcpy(tail, from, static_cast<size_t>(kFp8 ? left : (left + 1) / 2));
      from = tail;
    }
    const Bytes16 bytes = widen(kFp8 ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)) : nibbles(from));
    Vec16 value;
    QUARTZ_PARTS value.part[i] = kFp8 ? e4m3_values(bytes.part[i]) : e2m1_values(bytes.part[i]);
    finish(to + i, value, left < 16 ? left : 16);
  };
  if constexpr (kFp8) {
    if (w.scales == nullptr) {
      for (int64_t i = 0; i < count; i += 16)
        put_codes(i, codes + i, count - i, [](T* at, const Vec16& v, int64_t m) { put16<true>(at, v, m); });
      return;
    }
    const float* scales = static_cast<const float*>(w.scales) + scales_at;
    const bool one = w.block_columns % 16 == 0;
    int64_t block = k / w.block_columns, end = (block + 1) * w.block_columns - k;  // of the scale's elements, from k
    for (int64_t i = 0; i < count; i += 16) {
      if (i >= end) {
        ++block;
        end += w.block_columns;
      }
      alignas(64) float each[16] = {};
      if (!one) {
        for (int64_t j = 0; j < 16 && i + j < count; ++j) each[j] = scales[(k + i + j) / w.block_columns];
      }
      const Vec16 scale = one ? broadcast16(scales[block]) : load16(each);
      put_codes(i, codes + i, count - i, [&](T* at, const Vec16& v, int64_t m) { put16<false>(at, mul(v, scale), m); });
    }
  } else {
    constexpr bool kNv = kFormat == WeightFormat::kNvFp4;
    const uint8_t* scales = static_cast<const uint8_t*>(w.scales) + scales_at + k / (kNv ? 16 : 32);
    const auto scale_of = [&](int64_t i) {
      return kNv ? e4m3_to_float(scales[i / 16]) : e8m0_to_float(scales[i / 32]);
    };
    int64_t i = 0;
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, BFloat16>) {
      for (; i + 32 <= count; i += 32) put32(to + i, codes + i / 2, scale_of(i), scale_of(i + 16));
    }
#endif
    for (; i < count; i += 16) {
      const Vec16 scale = broadcast16(scale_of(i));
      put_codes(i, codes + i / 2, count - i,
                [&](T* at, const Vec16& v, int64_t m) { put16<true>(at, mul(v, scale), m); });
    }
  }
}

template <class T>
void decode_row(const QuantizedWeight& w, int64_t batch, int64_t n, int64_t k, int64_t count, T* to) {
  switch (w.format) {
    case WeightFormat::kFp8:
      return decode_row_as<WeightFormat::kFp8>(w, batch, n, k, count, to);
    case WeightFormat::kNvFp4:
      return decode_row_as<WeightFormat::kNvFp4>(w, batch, n, k, count, to);
    case WeightFormat::kMxFp4:
      return decode_row_as<WeightFormat::kMxFp4>(w, batch, n, k, count, to);
    case WeightFormat::kPlain:
      return;
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
