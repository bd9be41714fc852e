// Bringing the operands of a product into the order of its inner loop: words of 32 bits, the words of several rows side
// by side. A word is one float (float32, float16) or a pair of bfloat16 (the even k in the low half).
#pragma once

#include <type_traits>

#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {

template <class T>
constexpr int kPerWord = std::is_same_v<T, BFloat16> ? 2 : 1;

// Rows and columns of a kLanes x kLanes matrix of words exchanged.
QUARTZ_INLINE void transpose(Vec (&r)[kLanes]) {
#if defined(__AVX512F__)
  Vec t[16];
  const auto low = [](Vec a, Vec b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](Vec a, Vec b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  QUARTZ_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  QUARTZ_UNROLL for (int i = 0; i < 16;
                     i += 4) {  // now r[4 a + c] has the columns c, 4 + c, 8 + c, 12 + c of rows 4 a ...
    r[i] = low(t[i], t[i + 2]);
    r[i + 1] = high(t[i], t[i + 2]);
    r[i + 2] = low(t[i + 1], t[i + 3]);
    r[i + 3] = high(t[i + 1], t[i + 3]);
  }
  QUARTZ_UNROLL for (int c = 0; c < 4; ++c) {
    const Vec a = _mm512_shuffle_f32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_f32x4(r[c], r[4 + c], 0xdd);
    const Vec d = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0x88), e = _mm512_shuffle_f32x4(r[8 + c], r[12 + c], 0xdd);
    t[c] = _mm512_shuffle_f32x4(a, d, 0x88);
    t[4 + c] = _mm512_shuffle_f32x4(b, e, 0x88);
    t[8 + c] = _mm512_shuffle_f32x4(a, d, 0xdd);
    t[12 + c] = _mm512_shuffle_f32x4(b, e, 0xdd);
  }
  QUARTZ_UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
#else
  Vec t[8];
  QUARTZ_UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  QUARTZ_UNROLL for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  QUARTZ_UNROLL for (int c = 0; c < 4; ++c) {
    t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
    t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
  }
  QUARTZ_UNROLL for (int i = 0; i < 8; ++i) r[i] = t[i];
#endif
}

// kLanes words from elements of ascending k, of which `count` exist; zeros for the others, whose memory is not touched.
QUARTZ_INLINE Vec load_words(const float* p, int64_t count) {
  return count >= kLanes ? load(p) : load(p, first(count));
}
QUARTZ_INLINE Vec load_words(const Float16* p, int64_t count) {
  return count >= kLanes ? load(p) : load(p, first(count));
}
QUARTZ_INLINE Vec load_words(const BFloat16* p, int64_t count) {
  if (count >= 2 * kLanes) return load(reinterpret_cast<const float*>(p));
#if defined(__AVX512F__)
  return as_float(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), p));
#else
  alignas(32) uint16_t buffer[2 * kLanes] = {};
  memcpy(buffer, p, static_cast<size_t>(count) * 2);
  return as_float(load_int(buffer));
#endif
}

// One word of each of the lanes in `lanes`, which are next to each other in memory; `pair`: the next k exists.
QUARTZ_INLINE Vec load_across(const float* p, int64_t, bool, Mask lanes) { return load(p, lanes); }
QUARTZ_INLINE Vec load_across(const Float16* p, int64_t, bool, Mask lanes) { return load(p, lanes); }
QUARTZ_INLINE Vec load_across(const BFloat16* p, int64_t stride, bool pair, Mask lanes) {
  const IVec even = as_int(load(p, lanes)), odd = pair ? as_int(load(p + stride, lanes)) : as_int(zero());
#if defined(__AVX512F__)
  return as_float(_mm512_or_si512(odd, _mm512_srli_epi32(even, 16)));
#else
  return as_float(_mm256_or_si256(odd, _mm256_srli_epi32(even, 16)));
#endif
}

QUARTZ_INLINE uint32_t word_at(const float* p, int64_t, bool) { return bits_of_float(*p); }
QUARTZ_INLINE uint32_t word_at(const Float16* p, int64_t, bool) { return bits_of_float(kernels::to_float(*p)); }
QUARTZ_INLINE uint32_t word_at(const BFloat16* p, int64_t stride, bool pair) {
  return p->bits | (pair ? static_cast<uint32_t>(p[stride].bits) << 16 : 0u);
}

// The even and the odd k of a vector of bfloat16 pairs, as floats.
QUARTZ_INLINE Vec even_of(IVec words) { return as_float(shift_left<16>(words)); }
QUARTZ_INLINE Vec odd_of(IVec words) {
  return as_float(bit_and(words, broadcast_int(static_cast<int32_t>(0xffff0000u))));
}

// Packs `lanes` (at most kLanes) rows of k elements: word s of lane i goes to to[s * pitch + i]. With kSplit a pair
// becomes two floats, to[s * pitch + i] for the even k and to[s * pitch + odd + i] for the odd. Lanes up to kLanes are
// written, with zeros: the next word, written later, covers them, and there is room behind the last.
template <bool kSplit, class T>
void pack(float* to, int64_t pitch, int64_t odd, const T* from, int64_t lane_stride, int64_t k_stride, int64_t lanes,
          int64_t k) {
  constexpr int kWord = kPerWord<T>;
  const int64_t words = (k + kWord - 1) / kWord;
  const auto put = [&](int64_t s, Vec value) {
    if constexpr (kSplit) {
      store(to + s * pitch, even_of(as_int(value)));
      store(to + s * pitch + odd, odd_of(as_int(value)));
    } else {
      store(to + s * pitch, value);
    }
  };
  if (k_stride == 1) {
    for (int64_t s = 0; s < words; s += kLanes) {
      Vec rows[kLanes];
      const int64_t count = k - s * kWord;
      QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) {
        rows[i] = i < lanes ? load_words(from + i * lane_stride + s * kWord, count) : zero();
      }
      transpose(rows);
      if (words - s >= kLanes) {
        QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) put(s + i, rows[i]);
      } else {
        alignas(64) float buffer[kLanes][kLanes];
        QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) store(buffer[i], rows[i]);
        for (int64_t i = 0; i < words - s; ++i) put(s + i, load(buffer[i]));
      }
    }
  } else if (lane_stride == 1) {
    const Mask mask = first(lanes);
    for (int64_t s = 0; s < words; ++s) {
      put(s, load_across(from + s * kWord * k_stride, k_stride, s * kWord + 1 < k, mask));
    }
  } else {
    alignas(64) uint32_t buffer[kLanes] = {};
    for (int64_t s = 0; s < words; ++s) {
      const T* p = from + s * kWord * k_stride;
      for (int64_t i = 0; i < lanes; ++i) buffer[i] = word_at(p + i * lane_stride, k_stride, s * kWord + 1 < k);
      put(s, as_float(load_int(buffer)));
    }
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
