// The inner loops of a product: a tile of a few rows of x by one panel of kPanel columns (rows of w).
#pragma once

#include <algorithm>
#include <utility>

#include "kernels/cpu/matmul_pack.h"

namespace quartz::kernels::QUARTZ_ISA {

constexpr int64_t kChain = 256;               // k in one chain of fused multiply-adds: part of the contract
constexpr int kPanel = 2 * kLanes;            // columns of a tile
constexpr int kRows = kLanes == 16 ? 14 : 6;  // rows of a tile at most: kRows x 2 accumulators fill the registers

// How one word of every row and column is multiplied. kWidth: floats of packed x for each word and row.
struct FloatWords {
  static constexpr int kWidth = 1;
  template <int R>
  QUARTZ_INLINE void step(Vec (&sums)[R][2], const float* x, const float* w) {
    const Vec w0 = load(w), w1 = load(w + kLanes);
    QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
      const Vec value = broadcast(x[i]);
      sums[i][0] = fma(value, w0, sums[i][0]);
      sums[i][1] = fma(value, w1, sums[i][1]);
    }
  }
};
struct PairsByFma {
  static constexpr int kWidth = 2;
  template <int R>
  QUARTZ_INLINE void step(Vec (&sums)[R][2], const float* x, const float* w) {
    const IVec w0 = load_int(w), w1 = load_int(w + kLanes);
    half(sums, x + R, odd_of(w0), odd_of(w1));
    half(sums, x, even_of(w0), even_of(w1));
  }
  template <int R>
  QUARTZ_INLINE void half(Vec (&sums)[R][2], const float* x, Vec w0, Vec w1) {
    QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
      const Vec value = broadcast(x[i]);
      sums[i][0] = fma(value, w0, sums[i][0]);
      sums[i][1] = fma(value, w1, sums[i][1]);
    }
  }
};
#if defined(__AVX512BF16__)
struct PairsByDot {
  static constexpr int kWidth = 1;
  template <int R>
  QUARTZ_INLINE void step(Vec (&sums)[R][2], const float* x, const float* w) {
    const auto w0 = (__m512bh)load(w), w1 = (__m512bh)load(w + kLanes);
    QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
      const auto value = (__m512bh)broadcast(x[i]);
      sums[i][0] = _mm512_dpbf16_ps(sums[i][0], value, w0);
      sums[i][1] = _mm512_dpbf16_ps(sums[i][1], value, w1);
    }
  }
};
#endif

template <int R>
QUARTZ_INLINE void clear(Vec (&sums)[R][2]) {
  QUARTZ_UNROLL for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = zero();
}

// The result of a chain goes to the totals: the first is stored, later ones are added.
template <int R>
QUARTZ_INLINE void finish_chain(const Vec (&sums)[R][2], float* totals, int64_t pitch, bool first_chain) {
  if (first_chain) {
    QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
      store(totals + i * pitch, sums[i][0]);
      store(totals + i * pitch + kLanes, sums[i][1]);
    }
  } else {
    QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
      store(totals + i * pitch, add(load(totals + i * pitch), sums[i][0]));
      store(totals + i * pitch + kLanes, add(load(totals + i * pitch + kLanes), sums[i][1]));
    }
  }
}

// One chain over packed operands. `following`: the x of the next call, for the cache.
template <class A, int R>
__attribute__((noinline)) void chain(int64_t words, const float* x, const float* w, float* totals, int64_t pitch,
                                     bool first_chain, const float* following) {
  QUARTZ_UNROLL for (int i = 0; i < R; ++i) {
    _mm_prefetch(reinterpret_cast<const char*>(totals + i * pitch), _MM_HINT_T0);
    if (kPanel * 4 > 64) _mm_prefetch(reinterpret_cast<const char*>(totals + i * pitch + 16), _MM_HINT_T0);
  }
  const int64_t distance = following - x;
  Vec sums[R][2];
  clear(sums);
  for (int64_t s = 0; s < words; ++s) {
    if (R * A::kWidth > 4) _mm_prefetch(reinterpret_cast<const char*>(x + distance), _MM_HINT_T0);
    A::step(sums, x, w);
    x += R * A::kWidth;
    w += kPanel;
  }
  finish_chain(sums, totals, pitch, first_chain);
}

// Lines of memory that will be needed soon, fetched a few at a time: `rows` rows of `bytes` bytes.
class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const void* from, int64_t row_bytes, int64_t rows, int64_t bytes)
      : row_(static_cast<const char*>(from)), pitch_(row_bytes), bytes_(bytes), lines_(rows * ((bytes + 63) / 64)) {}
  QUARTZ_HD void next(int64_t lines) {
    lines = lines < lines_ ? lines : lines_;
    lines_ -= lines;
    const char* row = row_;
    int64_t at = at_;
    for (; lines > 0; --lines) {
      _mm_prefetch(row + at, _MM_HINT_T1);
      at += 64;
      const bool end = at >= bytes_;
      row = end ? row + pitch_ : row;
      at = end ? 0 : at;
    }
    row_ = row;
    at_ = at;
  }

 private:
  const char* row_ = nullptr;
  int64_t pitch_ = 0, bytes_ = 0, lines_ = 0, at_ = 0;
};

// Words of a row that are prefetched at a time by stream().
constexpr int64_t kAhead = 1024;

// All chains of a full panel of w whose k are contiguous, for products of few rows: each piece of w is read once, goes
// through kLanes words of scratch in L1 and is forgotten. What comes next, up to the panel `following` (or null), is
// prefetched row by row, which memory likes better than a line of every row in turn.
template <class A, class T, int R>
__attribute__((noinline)) void stream(const T* w, int64_t stride, int64_t k, const float* x, float* totals,
                                      const T* following) {
  constexpr int kWord = kPerWord<T>;
  constexpr int64_t kSize = sizeof(T);
  alignas(64) float block[kLanes][kPanel];
  const int64_t all_words = (k + kWord - 1) / kWord, pieces = std::max<int64_t>(1, all_words / kAhead);
  const int64_t piece = ((all_words + pieces - 1) / pieces + kLanes - 1) / kLanes * kLanes * kWord;
  Prefetch next;
  int64_t next_at = 0;
  for (int64_t begin = 0; begin < k; begin += kChain) {
    const int64_t count = std::min(kChain, k - begin), words = (count + kWord - 1) / kWord;
    Vec sums[R][2];
    clear(sums);
    for (int64_t s = 0; s < words; s += kLanes) {
      const int64_t at = begin + s * kWord;
      const T* from = w + at;
      if (at == next_at) {
        next_at += piece;
        const T* rows = next_at < k ? w + next_at : following;
        const int64_t bytes = (next_at < k ? std::min(piece, k - next_at) : std::min(piece, k)) * kSize;
        next = Prefetch(rows, stride * kSize, rows == nullptr ? 0 : kPanel, bytes);
      }
      next.next(kPanel * kLanes * kWord * kSize / 64);
      QUARTZ_UNROLL for (int half = 0; half < 2; ++half) {
        Vec rows[kLanes];
        if (count - s * kWord >= kLanes * kWord) {
          QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) {
            rows[i] = load_words(from + (half * kLanes + i) * stride, kLanes * kWord);
          }
        } else {
          QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) {
            rows[i] = load_words(from + (half * kLanes + i) * stride, count - s * kWord);
          }
        }
        transpose(rows);
        QUARTZ_UNROLL for (int i = 0; i < kLanes; ++i) store(block[i] + half * kLanes, rows[i]);
      }
      const int64_t n = std::min<int64_t>(kLanes, words - s);
      for (int64_t i = 0; i < n; ++i) {
        A::step(sums, x, block[i]);
        x += R * A::kWidth;
      }
    }
    finish_chain(sums, totals, kPanel, begin == 0);
  }
}

// The same for a w whose columns are contiguous, [k][columns]: nothing is packed. K elements of k at a time are added
// to sums of `rows` x `columns` floats, `pitch` apart, which stay in L1; x holds floats, row after row `x_pitch` apart.
// With `start` the sums begin at +0. `odd_missing`: the last pair of bfloat16 has no odd k.
template <class T, int K>
QUARTZ_INLINE void spread_step(const T* w, int64_t stride, int64_t columns, const float* x, int64_t x_pitch,
                               int64_t rows, float* sums, int64_t pitch, bool start, bool odd_missing) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    const Mask mask = first(columns - column);
    const bool whole = columns - column >= kLanes;
    Vec values[K];
    QUARTZ_UNROLL for (int i = 0; i < K; ++i) {
      const T* p = w + i * stride + column;
      if (kPerWord<T> == 2 && i == K - 1 && odd_missing) {
        values[i] = zero();
      } else {
        _mm_prefetch(reinterpret_cast<const char*>(p + K * stride), _MM_HINT_T0);
        values[i] = whole ? load(p) : load(p, mask);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      float* to = sums + row * pitch + column;
      const float* factor = x + row * x_pitch;
      Vec sum = start ? zero() : load(to);
      QUARTZ_UNROLL for (int i = 0; i < K; ++i) {
        const int k = kPerWord<T> == 2 ? i ^ 1 : i;  // of a pair, the odd k first
        sum = fma(broadcast(factor[k]), values[k], sum);
      }
      store(to, sum);
    }
  }
}
template <class T>
__attribute__((noinline)) void spread(const T* w, int64_t stride, int64_t columns, int64_t k, const float* x,
                                      int64_t x_pitch, int64_t rows, float* sums, int64_t pitch) {
  constexpr int kWord = kPerWord<T>;
  int64_t at = 0;
  for (; at + 8 <= k; at += 8) {
    spread_step<T, 8>(w + at * stride, stride, columns, x + at, x_pitch, rows, sums, pitch, at == 0, false);
  }
  for (; at < k; at += kWord) {
    spread_step<T, kWord>(w + at * stride, stride, columns, x + at, x_pitch, rows, sums, pitch, at == 0, at + 1 == k);
  }
}

template <class A>
using Chain = void (*)(int64_t, const float*, const float*, float*, int64_t, bool, const float*);
template <class A, class T>
using Stream = void (*)(const T*, int64_t, int64_t, const float*, float*, const T*);

template <class A, int... I>
QUARTZ_INLINE Chain<A> chain_of(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr Chain<A> kAll[] = {&chain<A, I + 1>...};
  return kAll[rows - 1];
}
template <class A>
QUARTZ_INLINE Chain<A> chain_of(int64_t rows) {
  return chain_of<A>(rows, std::make_integer_sequence<int, kRows>());
}
template <class A, class T, int... I>
QUARTZ_INLINE Stream<A, T> stream_of(int64_t rows, std::integer_sequence<int, I...>) {
  static constexpr Stream<A, T> kAll[] = {&stream<A, T, I + 1>...};
  return kAll[rows - 1];
}
template <class A, class T>
QUARTZ_INLINE Stream<A, T> stream_of(int64_t rows) {
  return stream_of<A, T>(rows, std::make_integer_sequence<int, kRows>());
}

}  // namespace quartz::kernels::QUARTZ_ISA
