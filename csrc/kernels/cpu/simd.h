// Vectors of float in the instruction set of this compilation: AVX2 (8 lanes) or AVX-512 (16 lanes).
//
// Included by the files of this folder only, each of which is compiled once for each set, in namespace QUARTZ_ISA.
// Arithmetic is exactly what is written: contraction is off, fma() is the only fused operation.
#pragma once

#include <immintrin.h>

#include "kernels/dtype.h"
#include "kernels/elementary.h"
#include "kernels/isa.h"

#ifndef QUARTZ_ISA
#error "compile this file with QUARTZ_ISA=cpu_avx2 or cpu_avx512, see CMakeLists.txt"
#endif

#define QUARTZ_INLINE static inline __attribute__((always_inline))
#define QUARTZ_UNROLL _Pragma("GCC unroll 16")

namespace quartz::kernels::QUARTZ_ISA {

#if defined(__AVX512F__)
using Vec = __m512;
using IVec = __m512i;
using Mask = __mmask16;
constexpr int kLanes = 16;

QUARTZ_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
QUARTZ_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a); }
QUARTZ_INLINE Mask first(int64_t count) {  // the first `count` lanes; all if there are more
  return count >= kLanes ? Mask(0xffff) : Mask((1u << count) - 1u);
}
QUARTZ_INLINE Vec load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
QUARTZ_INLINE void store(float* p, Vec a, Mask m) { _mm512_mask_storeu_ps(p, m, a); }
QUARTZ_INLINE Vec broadcast(float a) { return _mm512_set1_ps(a); }
QUARTZ_INLINE Vec zero() { return _mm512_setzero_ps(); }
QUARTZ_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
QUARTZ_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
QUARTZ_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
QUARTZ_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
QUARTZ_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
QUARTZ_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
// x where it is NaN, else the larger (smaller) of both.
QUARTZ_INLINE Vec max(Vec bound, Vec x) { return _mm512_max_ps(bound, x); }
QUARTZ_INLINE Vec min(Vec bound, Vec x) { return _mm512_min_ps(bound, x); }
QUARTZ_INLINE Mask is_nan(Vec x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); }
QUARTZ_INLINE Mask less(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_LT_OQ); }
QUARTZ_INLINE Mask equal(Vec x, Vec y) { return _mm512_cmp_ps_mask(x, y, _CMP_EQ_OQ); }
QUARTZ_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm512_mask_mov_ps(no, m, yes); }
QUARTZ_INLINE Vec as_float(IVec a) { return _mm512_castsi512_ps(a); }
QUARTZ_INLINE IVec as_int(Vec a) { return _mm512_castps_si512(a); }
QUARTZ_INLINE IVec load_int(const void* p) { return _mm512_loadu_si512(p); }
QUARTZ_INLINE IVec broadcast_int(int32_t a) { return _mm512_set1_epi32(a); }
QUARTZ_INLINE IVec add(IVec a, IVec b) { return _mm512_add_epi32(a, b); }
QUARTZ_INLINE IVec sub(IVec a, IVec b) { return _mm512_sub_epi32(a, b); }
QUARTZ_INLINE IVec bit_and(IVec a, IVec b) { return _mm512_and_si512(a, b); }
template <int N>
QUARTZ_INLINE IVec shift_left(IVec a) {
  return _mm512_slli_epi32(a, N);
}
template <int N>
QUARTZ_INLINE IVec shift_right(IVec a) {
  return _mm512_srai_epi32(a, N);
}
QUARTZ_INLINE Vec to_float(IVec a) { return _mm512_cvtepi32_ps(a); }

QUARTZ_INLINE Vec load(const BFloat16* p) {
  return as_float(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
QUARTZ_INLINE Vec load(const BFloat16* p, Mask m) {
  return as_float(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(m, p)), 16));
}
QUARTZ_INLINE Vec load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUARTZ_INLINE Vec load(const Float16* p, Mask m) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(m, p)); }
QUARTZ_INLINE __m256i narrow_bf16(Vec a) {  // from_float<BFloat16>, lane by lane
  const IVec bits = as_int(a), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const IVec rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const IVec quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan(a), quiet));
}
QUARTZ_INLINE void store(BFloat16* p, Vec a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a)); }
QUARTZ_INLINE void store(BFloat16* p, Vec a, Mask m) { _mm256_mask_storeu_epi16(p, m, narrow_bf16(a)); }
QUARTZ_INLINE void store(Float16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
QUARTZ_INLINE void store(Float16* p, Vec a, Mask m) {
  _mm256_mask_storeu_epi16(p, m, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
#else
using Vec = __m256;
using IVec = __m256i;
using Mask = __m256;  // all bits of a lane, as AVX2 compares give them
constexpr int kLanes = 8;

QUARTZ_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
QUARTZ_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a); }
QUARTZ_INLINE Mask first(int64_t count) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int limit = count >= kLanes ? kLanes : static_cast<int>(count);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(limit), lane));
}
QUARTZ_INLINE Vec load(const float* p, Mask m) { return _mm256_maskload_ps(p, _mm256_castps_si256(m)); }
QUARTZ_INLINE void store(float* p, Vec a, Mask m) { _mm256_maskstore_ps(p, _mm256_castps_si256(m), a); }
QUARTZ_INLINE Vec broadcast(float a) { return _mm256_set1_ps(a); }
QUARTZ_INLINE Vec zero() { return _mm256_setzero_ps(); }
QUARTZ_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
QUARTZ_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
QUARTZ_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
QUARTZ_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
QUARTZ_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
QUARTZ_INLINE Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
QUARTZ_INLINE Vec max(Vec bound, Vec x) { return _mm256_max_ps(bound, x); }
QUARTZ_INLINE Vec min(Vec bound, Vec x) { return _mm256_min_ps(bound, x); }
QUARTZ_INLINE Mask is_nan(Vec x) { return _mm256_cmp_ps(x, x, _CMP_UNORD_Q); }
QUARTZ_INLINE Mask less(Vec x, Vec y) { return _mm256_cmp_ps(x, y, _CMP_LT_OQ); }
QUARTZ_INLINE Mask equal(Vec x, Vec y) { return _mm256_cmp_ps(x, y, _CMP_EQ_OQ); }
QUARTZ_INLINE Vec select(Mask m, Vec yes, Vec no) { return _mm256_blendv_ps(no, yes, m); }
QUARTZ_INLINE Vec as_float(IVec a) { return _mm256_castsi256_ps(a); }
QUARTZ_INLINE IVec as_int(Vec a) { return _mm256_castps_si256(a); }
QUARTZ_INLINE IVec load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
QUARTZ_INLINE IVec broadcast_int(int32_t a) { return _mm256_set1_epi32(a); }
QUARTZ_INLINE IVec add(IVec a, IVec b) { return _mm256_add_epi32(a, b); }
QUARTZ_INLINE IVec sub(IVec a, IVec b) { return _mm256_sub_epi32(a, b); }
QUARTZ_INLINE IVec bit_and(IVec a, IVec b) { return _mm256_and_si256(a, b); }
template <int N>
QUARTZ_INLINE IVec shift_left(IVec a) {
  return _mm256_slli_epi32(a, N);
}
template <int N>
QUARTZ_INLINE IVec shift_right(IVec a) {
  return _mm256_srai_epi32(a, N);
}
QUARTZ_INLINE Vec to_float(IVec a) { return _mm256_cvtepi32_ps(a); }

// The masked forms of 16-bit types go through a small buffer: AVX2 has no masked access to 16-bit lanes.
template <class T>
QUARTZ_INLINE __m128i load_16bit(const T* p, Mask m) {
  alignas(16) uint16_t buffer[8] = {};
  const int lanes = __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(m)));
  memcpy(buffer, p, static_cast<size_t>(lanes) * 2);
  return _mm_load_si128(reinterpret_cast<const __m128i*>(buffer));
}
template <class T>
QUARTZ_INLINE void store_16bit(T* p, __m128i a, Mask m) {
  alignas(16) uint16_t buffer[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(buffer), a);
  memcpy(p, buffer, static_cast<size_t>(__builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(m)))) * 2);
}
QUARTZ_INLINE Vec widen_bf16(__m128i a) { return as_float(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)); }
QUARTZ_INLINE Vec load(const BFloat16* p) { return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
QUARTZ_INLINE Vec load(const BFloat16* p, Mask m) { return widen_bf16(load_16bit(p, m)); }
QUARTZ_INLINE Vec load(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUARTZ_INLINE Vec load(const Float16* p, Mask m) { return _mm256_cvtph_ps(load_16bit(p, m)); }
QUARTZ_INLINE __m128i narrow_bf16(Vec a) {
  const IVec bits = as_int(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const IVec rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
  const IVec quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const IVec words = _mm256_blendv_epi8(rounded, quiet, as_int(is_nan(a)));
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
QUARTZ_INLINE void store(BFloat16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a)); }
QUARTZ_INLINE void store(BFloat16* p, Vec a, Mask m) { store_16bit(p, narrow_bf16(a), m); }
QUARTZ_INLINE void store(Float16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
QUARTZ_INLINE void store(Float16* p, Vec a, Mask m) {
  store_16bit(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT), m);
}
#endif

// exp_f32 and log_f32 of elementary.h, lane by lane in the same bits.
QUARTZ_INLINE Vec exp(Vec x) {
  using namespace exp_constants;
  const Vec clamped = min(broadcast(kHighest), max(broadcast(kLowest), x));
  const Vec shifted = fma(clamped, broadcast(kLog2E), broadcast(kMagic)), n = sub(shifted, broadcast(kMagic));
  Vec r = fma(n, broadcast(-kLn2High), clamped);
  r = fma(n, broadcast(-kLn2Low), r);
  Vec p = fma(broadcast(kC7), r, broadcast(kC6));
  p = fma(p, r, broadcast(kC5));
  p = fma(p, r, broadcast(kC4));
  p = fma(p, r, broadcast(kC3));
  p = fma(p, r, broadcast(kC2));
  p = add(fma(mul(p, r), r, r), broadcast(1.0f));
  const IVec power = sub(as_int(shifted), as_int(broadcast(kMagic))), half = shift_right<1>(power);
  p = mul(p, as_float(shift_left<23>(add(half, broadcast_int(127)))));
  p = mul(p, as_float(shift_left<23>(add(sub(power, half), broadcast_int(127)))));
  return select(is_nan(x), broadcast(float_of_bits(kQuietNan)), p);
}

QUARTZ_INLINE Vec log(Vec x) {
  using namespace log_constants;
  const Mask subnormal = less(x, broadcast(kSmallestNormal));
  const Vec y = select(subnormal, mul(x, broadcast(kScale)), x);
  const IVec t = sub(as_int(y), broadcast_int(static_cast<int32_t>(kSqrtHalf)));
  const IVec correction = as_int(select(subnormal, as_float(broadcast_int(-23)), zero()));
  const Vec e = to_float(add(shift_right<23>(t), correction));
  const IVec mantissa = add(bit_and(t, broadcast_int(0x7fffff)), broadcast_int(static_cast<int32_t>(kSqrtHalf)));
  const Vec f = sub(as_float(mantissa), broadcast(1.0f)), z = mul(f, f);
  Vec p = fma(broadcast(kC11), f, broadcast(kC10));
  p = fma(p, f, broadcast(kC9));
  p = fma(p, f, broadcast(kC8));
  p = fma(p, f, broadcast(kC7));
  p = fma(p, f, broadcast(kC6));
  p = fma(p, f, broadcast(kC5));
  p = fma(p, f, broadcast(kC4));
  p = fma(p, f, broadcast(kC3));
  Vec q = fma(mul(f, z), p, mul(e, broadcast(exp_constants::kLn2Low)));
  q = fma(broadcast(-0.5f), z, q);
  q = add(q, f);
  q = fma(e, broadcast(exp_constants::kLn2High), q);
  const Vec infinity = broadcast(float_of_bits(kInfinity)), nan = broadcast(float_of_bits(kQuietNan));
  q = select(equal(x, infinity), x, q);
  q = select(equal(x, zero()), sub(zero(), infinity), q);
  q = select(less(x, zero()), nan, q);
  return select(is_nan(x), nan, q);
}

// The sum (maximum) of 16 floats by a fixed tree: i with i + 8, then i + 4, i + 2, i + 1. The same for every set.
QUARTZ_INLINE float sum_of_16(const float* values) {
  const __m256 a = _mm256_add_ps(_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

// 16 lanes in either set: one vector of AVX-512 or two of AVX2, so that a kernel can state its order in sixteenths.
struct Vec16 {
  Vec part[16 / kLanes];
};
#define QUARTZ_PARTS for (int i = 0; i < 16 / kLanes; ++i)
QUARTZ_INLINE Vec16 zero16() {
  Vec16 r;
  QUARTZ_PARTS r.part[i] = zero();
  return r;
}
QUARTZ_INLINE Vec16 broadcast16(float a) {
  Vec16 r;
  QUARTZ_PARTS r.part[i] = broadcast(a);
  return r;
}
// The first `count` (at most 16) elements; the lanes behind are 0 and their memory is not touched.
template <class T>
QUARTZ_INLINE Vec16 load16(const T* p, int64_t count = 16) {
  Vec16 r;
  if (count >= 16) {
    QUARTZ_PARTS r.part[i] = load(p + i * kLanes);
  } else {
    QUARTZ_PARTS r.part[i] = count > i * kLanes ? load(p + i * kLanes, first(count - i * kLanes)) : zero();
  }
  return r;
}
template <class T>
QUARTZ_INLINE void store16(T* p, const Vec16& a, int64_t count = 16) {
  if (count >= 16) {
    QUARTZ_PARTS store(p + i * kLanes, a.part[i]);
  } else {
    QUARTZ_PARTS if (count > i * kLanes) store(p + i * kLanes, a.part[i], first(count - i * kLanes));
  }
}
QUARTZ_INLINE Vec16 fma(const Vec16& a, const Vec16& b, const Vec16& c) {
  Vec16 r;
  QUARTZ_PARTS r.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return r;
}
#define QUARTZ_VEC16_BINARY(NAME)                            \
  QUARTZ_INLINE Vec16 NAME(const Vec16& a, const Vec16& b) { \
    Vec16 r;                                                 \
    QUARTZ_PARTS r.part[i] = NAME(a.part[i], b.part[i]);     \
    return r;                                                \
  }
QUARTZ_VEC16_BINARY(add)
QUARTZ_VEC16_BINARY(sub)
QUARTZ_VEC16_BINARY(mul)
QUARTZ_VEC16_BINARY(div)
QUARTZ_VEC16_BINARY(max)
QUARTZ_VEC16_BINARY(min)
#undef QUARTZ_VEC16_BINARY
QUARTZ_INLINE Vec16 exp(const Vec16& a) {
  Vec16 r;
  QUARTZ_PARTS r.part[i] = exp(a.part[i]);
  return r;
}
QUARTZ_INLINE float sum_of(const Vec16& a) {
  alignas(64) float values[16];
  QUARTZ_PARTS store(values + i * kLanes, a.part[i]);
  return sum_of_16(values);
}

}  // namespace quartz::kernels::QUARTZ_ISA
