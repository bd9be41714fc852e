// What attention on the CPU is made of: chains of fma over rows of memory, key rows turned into vectors across keys,
// sums of probabilities as integers. Each function keeps the order that kernels/attention.h states.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "kernels/attention.h"
#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int64_t kTile = 64;                   // keys at a time, for speed only
constexpr int kRows = 6;                        // rows of a register block
constexpr int kColumns = kLanes == 16 ? 4 : 2;  // vectors of a register block
constexpr int kFewRows = 8;                     // up to here keys are turned in registers, not through memory
constexpr int kAhead = 64;                      // keys between a prefetch and the use
constexpr float kInf = __builtin_inff();

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Memory of the calling thread, kept from call to call up to a limit.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(int64_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = round_up(bytes, 1 << 16);
      data_ = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(size_)));
      if (data_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }
  void trim(int64_t limit) {
    if (size_ <= limit) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Where the vectors of a product's inner dimension come from: rows of a block of floats, or rows anywhere.
struct Packed {
  const float* data;
  int64_t stride;
  QUARTZ_HD Vec at(int64_t k, int64_t column) const { return load(data + k * stride + column); }
  QUARTZ_HD void prefetch(int64_t, int64_t) const {}
};
template <class T>
struct Scattered {
  const T* const* rows;
  int64_t ahead;  // rows that may be prefetched
  QUARTZ_HD Vec at(int64_t k, int64_t column) const { return load(rows[k] + column); }
  QUARTZ_HD void prefetch(int64_t k, int64_t column) const {
    if (k + kAhead < ahead) _mm_prefetch(reinterpret_cast<const char*>(rows[k + kAhead] + column), _MM_HINT_T1);
  }
};

// c[i, column] = chain over k of fma(a[i, k], b[k, column], .), from c or from +0.
template <int R, int C, bool kFromZero, class B>
__attribute__((noinline)) void chains(const float* a, int64_t lda, int64_t n, B b, int64_t column, float* c,
                                      int64_t ldc) {
  Vec sum[R][C];
  QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
    QUARTZ_UNROLL for (int v = 0; v < C; ++v) sum[i][v] = kFromZero ? zero() : load(c + i * ldc + v * kLanes);
  }
  for (int64_t k = 0; k < n; ++k) {
    Vec w[C];
    QUARTZ_UNROLL for (int v = 0; v < C; ++v) {
      w[v] = b.at(k, column + v * kLanes);
      b.prefetch(k, column + v * kLanes);
    }
    QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
      const Vec x = broadcast(a[i * lda + k]);
      QUARTZ_UNROLL for (int v = 0; v < C; ++v) sum[i][v] = fma(x, w[v], sum[i][v]);
    }
  }
  QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
    QUARTZ_UNROLL for (int v = 0; v < C; ++v) store(c + i * ldc + v * kLanes, sum[i][v]);
  }
}

template <int R, bool kFromZero, class B>
QUARTZ_INLINE void chains_of_rows(int64_t columns, const float* a, int64_t lda, int64_t n, B b, float* c, int64_t ldc) {
  int64_t column = 0;
  for (; column + kColumns * kLanes <= columns; column += kColumns * kLanes) {
    chains<R, kColumns, kFromZero>(a, lda, n, b, column, c + column, ldc);
  }
  for (; column < columns; column += kLanes) chains<R, 1, kFromZero>(a, lda, n, b, column, c + column, ldc);
}

// At most kRows rows; columns is a multiple of kLanes.
template <bool kFromZero, class B>
void product(int64_t rows, int64_t columns, const float* a, int64_t lda, int64_t n, B b, float* c, int64_t ldc) {
  switch (rows) {
    case 1:
      return chains_of_rows<1, kFromZero>(columns, a, lda, n, b, c, ldc);
    case 2:
      return chains_of_rows<2, kFromZero>(columns, a, lda, n, b, c, ldc);
    case 3:
      return chains_of_rows<3, kFromZero>(columns, a, lda, n, b, c, ldc);
    case 4:
      return chains_of_rows<4, kFromZero>(columns, a, lda, n, b, c, ldc);
    case 5:
      return chains_of_rows<5, kFromZero>(columns, a, lda, n, b, c, ldc);
    default:
      return chains_of_rows<6, kFromZero>(columns, a, lda, n, b, c, ldc);
  }
}

// kLanes rows of kLanes words become kLanes columns.
QUARTZ_INLINE void transpose(Vec (&r)[kLanes]) {
#if defined(__AVX512F__)
  Vec t[16];
  QUARTZ_UNROLL for (int i = 0; i < 16; i += 4) {  // 4 x 4 blocks within the 128-bit lanes
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(r[i], r[i + 1]));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(r[i], r[i + 1]));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(r[i + 2], r[i + 3]));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(r[i + 2], r[i + 3]));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23));
    t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23));
    t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23));
  }
  QUARTZ_UNROLL for (int i = 0; i < 4; ++i) {  // and the 128-bit lanes
    const Vec a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
    const Vec c = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i] = _mm512_shuffle_f32x4(a, b, 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
    r[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
#else
  Vec t[8];
  QUARTZ_UNROLL for (int i = 0; i < 8; i += 4) {
    const Vec low01 = _mm256_unpacklo_ps(r[i], r[i + 1]), high01 = _mm256_unpackhi_ps(r[i], r[i + 1]);
    const Vec low23 = _mm256_unpacklo_ps(r[i + 2], r[i + 3]), high23 = _mm256_unpackhi_ps(r[i + 2], r[i + 3]);
    t[i] = _mm256_shuffle_ps(low01, low23, 0x44);
    t[i + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
    t[i + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
    t[i + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
  }
  QUARTZ_UNROLL for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
#endif
}

// Elements of the head that one transposition turns: words of two bfloat16, else floats.
template <class T>
constexpr int kTurned = std::is_same_v<T, BFloat16> ? 2 * kLanes : kLanes;

template <class T>
QUARTZ_INLINE Vec load_words(const T* p) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return as_float(load_int(p));
  } else {
    return load(p);
  }
}

// Calls use(i, vector) for i = 0 to count - 1 ascending, with the elements first + i of the kLanes rows.
template <class T, class Use>
QUARTZ_INLINE void turned(const T* const* rows, int64_t first, int64_t count, Use use) {
  Vec words[kLanes];
  const bool whole = count >= kTurned<T>;
  if (whole) {
    QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) words[i] = load_words(rows[i] + first);
  } else {
    for (int i = 0; i < kLanes; ++i) {
      T buffer[kTurned<T>] = {};
      memcpy(buffer, rows[i] + first, static_cast<size_t>(count) * sizeof(T));
      words[i] = load_words(buffer);
    }
  }
  transpose(words);
  const auto one = [&](int i) __attribute__((always_inline)) {
    if constexpr (std::is_same_v<T, BFloat16>) {
      const IVec pair = as_int(words[i / 2]);
      return as_float(i % 2 == 0 ? shift_left<16>(pair)
                                 : bit_and(pair, broadcast_int(static_cast<int32_t>(0xffff0000))));
    } else {
      return words[i];
    }
  };
  if (whole) {
    _Pragma("GCC unroll 32") for (int i = 0; i < kTurned<T>; ++i) use(i, one(i));
  } else {
    for (int i = 0; i < count; ++i) use(i, one(i));
  }
}

// Scores of kLanes keys for R rows: keys turned in registers.
template <int R, class T>
__attribute__((noinline)) void few_scores(const float* q, int64_t ldq, const T* const* keys, const T* const* next,
                                          int64_t head_size, float* scores, int64_t lds) {
  Vec sum[R];
  QUARTZ_UNROLL for (int r = 0; r < R; ++r) sum[r] = zero();
  const int64_t steps = (head_size + kTurned<T> - 1) / kTurned<T>, rows = (kLanes + steps - 1) / steps;
  int64_t ahead = 0;
  for (int64_t d = 0; d < head_size; d += kTurned<T>) {
    if (next != nullptr) {
      for (int64_t stop = std::min<int64_t>(kLanes, ahead + rows); ahead < stop; ++ahead) {
        const char* row = reinterpret_cast<const char*>(next[ahead]);
        for (int64_t byte = 0; byte < head_size * int64_t{sizeof(T)}; byte += 64) _mm_prefetch(row + byte, _MM_HINT_T1);
      }
    }
    turned<T>(
        keys, d, head_size - d, [&](int i, Vec key) __attribute__((always_inline)) {
          QUARTZ_UNROLL for (int r = 0; r < R; ++r) sum[r] = fma(broadcast(q[r * ldq + d + i]), key, sum[r]);
        });
  }
  QUARTZ_UNROLL for (int r = 0; r < R; ++r) store(scores + r * lds, sum[r]);
}

template <class T>
void few_scores_of(int64_t rows, const float* q, int64_t ldq, const T* const* keys, const T* const* next,
                   int64_t head_size, float* scores, int64_t lds) {
  switch (rows) {
#define QUARTZ_CASE(R) \
  case R:              \
    return few_scores<R, T>(q, ldq, keys, next, head_size, scores, lds);
    QUARTZ_CASE(1)
    QUARTZ_CASE(2)
    QUARTZ_CASE(3)
    QUARTZ_CASE(4)
    QUARTZ_CASE(5)
    QUARTZ_CASE(6)
    QUARTZ_CASE(7)
    default:
      return few_scores<8, T>(q, ldq, keys, next, head_size, scores, lds);
#undef QUARTZ_CASE
  }
}

// packed[d, j] = element d of key j, for `count` keys (a multiple of kLanes).
template <class T>
__attribute__((noinline)) void pack_keys(const T* const* keys, int64_t count, int64_t head_size, float* packed) {
  for (int64_t j = 0; j < count; j += kLanes) {
    for (int64_t d = 0; d < head_size; d += kTurned<T>) {
      turned<T>(
          keys + j, d, head_size - d, [&](int i, Vec key) __attribute__((always_inline)) {
            store(packed + (d + i) * kTile + j, key);
          });
    }
  }
}

// Copies value rows to floats, zeros behind `width`; returns whether all are finite.
template <class T>
__attribute__((noinline)) bool pack_values(const T* const* values, int64_t count, int64_t width, float* packed,
                                           int64_t stride) {
  Vec check = zero();
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t d = 0; d < stride; d += kLanes) {
      const int64_t rest = width - d;
      const Vec value = rest >= kLanes ? load(values[j] + d) : load(values[j] + d, first(std::max<int64_t>(rest, 0)));
      check = fma(value, zero(), check);
      store(packed + j * stride + d, value);
    }
  }
  float lanes[kLanes], sum = 0;
  store(lanes, check);
  for (const float lane : lanes) sum += lane;
  return sum == 0;
}

// Bits of the lanes.
QUARTZ_INLINE uint32_t bits_of(Mask m) {
#if defined(__AVX512F__)
  return m;
#else
  return static_cast<uint32_t>(_mm256_movemask_ps(m));
#endif
}

// Sum of probabilities (0 to 1) as multiples of 2^-38: exact integers, at most 2^25 of them.
class ExactSum {
 public:
  QUARTZ_HD void add(Vec p) {
#if defined(__AVX512F__)
    const Vec scaled = mul(p, broadcast(0x1p38f));
    sum_[0] = _mm512_add_epi64(sum_[0], _mm512_cvtps_epi64(_mm512_castps512_ps256(scaled)));
    sum_[1] = _mm512_add_epi64(sum_[1], _mm512_cvtps_epi64(_mm512_extractf32x8_ps(scaled, 1)));
#else
    const __m256d unit = _mm256_set1_pd(0x1p38), magic = _mm256_set1_pd(0x1.8p52);  // rounds to integers
    const __m256d a = _mm256_add_pd(_mm256_mul_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(p)), unit), magic);
    const __m256d b = _mm256_add_pd(_mm256_mul_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(p, 1)), unit), magic);
    const __m256i bias = _mm256_castpd_si256(magic);
    sum_[0] = _mm256_add_epi64(sum_[0], _mm256_sub_epi64(_mm256_castpd_si256(a), bias));
    sum_[1] = _mm256_add_epi64(sum_[1], _mm256_sub_epi64(_mm256_castpd_si256(b), bias));
#endif
  }
  QUARTZ_HD double total() const {
    constexpr int n = kLanes / 2;
    int64_t parts[2 * n];
    memcpy(parts, sum_, sizeof parts);
    uint64_t all = 0;
    for (int i = 0; i < 2 * n; ++i) all += static_cast<uint64_t>(parts[i]);
    return static_cast<double>(static_cast<int64_t>(all)) * 0x1p-38;
  }

 private:
  IVec sum_[2] = {broadcast_int(0), broadcast_int(0)};
};

// tanh: odd polynomial below 5/8, else 1 - 2 / (exp(2 |x|) + 1); within 2 ulp.
QUARTZ_INLINE Vec tanh(Vec x) {
  const Vec sign = as_float(bit_and(as_int(x), broadcast_int(INT32_MIN)));
  const Vec size = as_float(bit_and(as_int(x), broadcast_int(INT32_MAX)));
  const Vec z = mul(x, x);
  Vec p = fma(z, broadcast(-0x1.76abf6p-8f), broadcast(0x1.5256cep-6f));
  p = fma(p, z, broadcast(-0x1.b84448p-5f));
  p = fma(p, z, broadcast(0x1.110768p-3f));
  p = fma(p, z, broadcast(-0x1.555534p-2f));
  const Vec small = fma(mul(p, z), x, x);
  const Vec one = broadcast(1.0f);
  const Vec large = sub(one, div(broadcast(2.0f), add(exp(add(size, size)), one)));
  const Vec signed_large = as_float(add(as_int(large), as_int(sign)));  // large is positive: sets the sign bit
  return select(is_nan(x), x, select(less(size, broadcast(0.625f)), small, signed_large));
}

}  // namespace
}  // namespace quartz::kernels::QUARTZ_ISA
