#include "kernels/matmul.h"

#include <algorithm>
#include <utility>

#include "kernels/cpu/matmul_epilogue.h"
#include "kernels/cpu/matmul_tile.h"
#include "kernels/cpu/quantized_decode.h"
#include "kernels/scratch.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The modes of the processor while a task runs: those of the contract, not those of the thread.
class Modes {
 public:
  explicit Modes(bool flush) : before_(_mm_getcsr()) { _mm_setcsr(flush ? 0x1f80u | 0x8040u : 0x1f80u); }
  ~Modes() { _mm_setcsr(before_); }
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;

 private:
  unsigned before_;
};

// One product of the batch.
template <class T>
struct Problem {
  const T *x, *w, *bias;
  char* out;
  int64_t m, n, k, batch;
};

template <class T>
Problem<T> problem(const Matmul& a, int64_t b) {
  Problem<T> p{static_cast<const T*>(a.x),
               static_cast<const T*>(a.w),
               static_cast<const T*>(a.bias),
               static_cast<char*>(a.out),
               a.m,
               a.n,
               a.k,
               b};
  int64_t out = 0;
  const int64_t begin = a.offsets == nullptr || b == 0 ? 0 : a.offsets[b - 1];
  const int64_t size = a.offsets == nullptr ? 0 : a.offsets[b] - begin;
  p.x += a.ragged == Ragged::kM ? begin * a.x_strides.row
                                : (a.ragged == Ragged::kK ? begin * a.x_strides.column : b * a.x_strides.batch);
  p.w += a.ragged == Ragged::kN ? begin * a.w_strides.row
                                : (a.ragged == Ragged::kK ? begin * a.w_strides.column : b * a.w_strides.batch);
  out = a.ragged == Ragged::kM ? begin * a.out_strides.row
                               : (a.ragged == Ragged::kN ? begin * a.out_strides.column : b * a.out_strides.batch);
  if (p.bias != nullptr) {
    p.bias += b * a.bias_strides.batch + (a.ragged == Ragged::kM ? begin * a.bias_strides.row : 0) +
              (a.ragged == Ragged::kN ? begin * a.bias_strides.column : 0);
  }
  if (a.ragged == Ragged::kM) p.m = size;
  if (a.ragged == Ragged::kN) p.n = size;
  if (a.ragged == Ragged::kK) p.k = size;
  p.out += out * size_of(a.out_dtype);
  return p;
}

// One result: the chains are the lanes of a vector, since they do not wait for one another.
template <class T>
float dot(const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t k) {
  constexpr int64_t kWords = kChain / kPerWord<T>;
  const Scratch packed(Scratch::kPanels, (2 * kWords + 1) * kLanes * 4);
  float *a = packed.floats(), *b = a + kWords * kLanes, total = 0.0f;
  for (int64_t begin = 0, lanes; begin < k; begin += lanes * kChain) {
    lanes = std::clamp<int64_t>((k - begin) / kChain, 1, kLanes);
    const int64_t count = std::min(kChain, k - begin);  // less than a chain only for the last, alone
    pack<false>(a, kLanes, 0, x + begin * x_stride, kChain * x_stride, x_stride, lanes, count);
    pack<false>(b, kLanes, 0, w + begin * w_stride, kChain * w_stride, w_stride, lanes, count);
    Vec sums = zero();
    for (int64_t s = 0; s < divide_up(count, kPerWord<T>); ++s) {
      const Vec u = load(a + s * kLanes), v = load(b + s * kLanes);
      if constexpr (kPerWord<T> == 1) {
        sums = fma(u, v, sums);
      } else {
        sums = fma(odd_of(as_int(u)), odd_of(as_int(v)), sums);
        sums = fma(even_of(as_int(u)), even_of(as_int(v)), sums);
      }
    }
    alignas(64) float results[kLanes];
    store(results, sums);
    for (int64_t i = 0; i < lanes; ++i) total = begin + i == 0 ? results[i] : total + results[i];
  }
  return total;
}

// Rows [row, row_end) and panels [panel, panel_end) of a product, on one thread.
struct Part {
  int64_t row, row_end, panel, panel_end;
};

template <class T, class A>
class Worker {
 public:
  explicit Worker(const Matmul& a) : a_(a), quantized_(a.quantized.format != WeightFormat::kPlain) {}

  void run(const Problem<T>& p, const Part& part) {
    if (part.row >= part.row_end || part.panel >= part.panel_end) return;
    if (p.m == 1 && p.n == 1 && !quantized_) {
      alignas(64) float sum[16] = {};
      sum[0] = dot(p.x, a_.x_strides.column, p.w, a_.w_strides.column, p.k);
      return finish(p, 0, 0, sum, 16, 1, 1);
    }
    if (a_.w_strides.row == 1 && a_.w_strides.column != 1 && part.row_end - part.row <= kRows && !quantized_) {
      return spread_columns(p, part);
    }
    const int64_t blocks = divide_up(part.row_end - part.row, kRows), groups = divide_up(blocks, kGroup);
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = blocks * group / groups, last = blocks * (group + 1) / groups;
      rows_of_group(p, part, blocks, first, last);
    }
  }

 private:
  static constexpr int kWord = kPerWord<T>, kWidth = A::kWidth;
  static constexpr bool kNative = kWord == 2 && kWidth == 1;  // by vdpbf16ps: its companions are there too
  static constexpr int64_t kChainWords = kChain / kWord;
  static constexpr int64_t kGroup = 24;  // row blocks whose packed x and sums stay in L2 with a tile of w

  void rows_of_group(const Problem<T>& p, const Part& part, int64_t blocks, int64_t first, int64_t last) {
    const int64_t rows = part.row_end - part.row;
    const auto row_at = [&](int64_t block) { return part.row + block * rows / blocks; };
    // x, packed: block after block, each [words][rows of the block].
    const int64_t words = divide_up(p.k, kWord), most = divide_up(rows, blocks);
    const int64_t block_floats = divide_up(words * kWidth * most + kLanes, 16) * 16;
    const Scratch packed(Scratch::kRows, (last - first) * block_floats * 4);
    for (int64_t block = first; block < last; ++block) {
      const int64_t row = row_at(block), count = row_at(block + 1) - row;
      pack<kWidth == 2>(packed.floats() + (block - first) * block_floats, count * kWidth, count,
                        p.x + row * a_.x_strides.row, a_.x_strides.row, a_.x_strides.column, count, p.k);
    }
    if (first + 1 == last && a_.w_strides.column == 1 && !quantized_) {
      return stream_panels(p, part, row_at(first), row_at(last), packed.floats());
    }

    constexpr int64_t panels_at_once = 2;
    const int64_t begin_row = row_at(first), all_rows = row_at(last) - begin_row;
    const int64_t pitch = panels_at_once * kPanel, tile_floats = kChainWords * kPanel;
    const Scratch tiles(Scratch::kPanels, panels_at_once * tile_floats * 4);
    const Scratch totals(Scratch::kTotals, all_rows * pitch * 4);
    Chain<A> kernels[kRows + 1];
    for (int64_t r = 1; r <= kRows; ++r) kernels[r] = chain_of<A>(r);
    for (int64_t panel = part.panel; panel < part.panel_end; panel += panels_at_once) {
      const int64_t panels = std::min(panels_at_once, part.panel_end - panel), column = panel * kPanel;
      const int64_t columns = std::min(panels * kPanel, p.n - column);
      if (p.k == 0) std::fill_n(totals.floats(), all_rows * pitch, 0.0f);
      for (int64_t k = 0; k < p.k; k += kChain) {
        const int64_t count = std::min(kChain, p.k - k), tile_words = divide_up(count, kWord);
        for (int64_t j = 0; j < panels; ++j)
          pack_panel(p, column + j * kPanel, k, count, tiles.floats() + j * tile_floats);
        const bool last_tile = k + kChain >= p.k;
        Prefetch next = ahead(p, last_tile ? column + panels * kPanel : column, last_tile ? 0 : k + kChain,
                              std::min<int64_t>(panels, part.panel_end - panel) * kPanel, part);
        const int64_t lines =
            2 + panels * kPanel * kChain * static_cast<int64_t>(sizeof(T)) / 64 / ((last - first) * panels);
        for (int64_t j = 0; j < panels; ++j) {
          for (int64_t block = first; block < last; ++block) {
            const int64_t row = row_at(block), height = row_at(block + 1) - row;
            const float* x = packed.floats() + (block - first) * block_floats + k / kWord * height * kWidth;
            const float* after = block + 1 < last ? x + block_floats : packed.floats() + k / kWord * height * kWidth;
            next.next(lines);
            kernels[height](tile_words, x, tiles.floats() + j * tile_floats,
                            totals.floats() + (row - begin_row) * pitch + j * kPanel, pitch, k == 0, after);
          }
        }
      }
      finish(p, begin_row, column, totals.floats(), pitch, all_rows, columns);
    }
  }

  // Few rows: every panel of w is read once, from memory into registers.
  void stream_panels(const Problem<T>& p, const Part& part, int64_t row, int64_t row_end, const float* x) {
    const int64_t rows = row_end - row, stride = a_.w_strides.row;
    alignas(64) float totals[kRows * kPanel];
    const auto kernel = stream_of<A, T>(rows);
    for (int64_t panel = part.panel; panel < part.panel_end; ++panel) {
      const int64_t column = panel * kPanel, columns = std::min<int64_t>(kPanel, p.n - column);
      if (p.k == 0) {
        std::fill_n(totals, rows * kPanel, 0.0f);
      } else if (columns == kPanel) {
        const bool more = panel + 1 < part.panel_end && column + 2 * kPanel <= p.n;
        kernel(p.w + column * stride, stride, p.k, x, totals, more ? p.w + (column + kPanel) * stride : nullptr);
      } else {
        const Scratch tile(Scratch::kPanels, kChainWords * kPanel * 4);
        for (int64_t k = 0; k < p.k; k += kChain) {
          const int64_t count = std::min(kChain, p.k - k);
          pack_panel(p, column, k, count, tile.floats());
          chain_of<A>(rows)(divide_up(count, kWord), x + k / kWord * rows * kWidth, tile.floats(), totals, kPanel,
                            k == 0, x);
        }
      }
      finish(p, row, column, totals, kPanel, rows, columns);
    }
  }

  // Few rows, and the columns of w contiguous: they are read where they are.
  void spread_columns(const Problem<T>& p, const Part& part) {
    const int64_t rows = part.row_end - part.row, wide = rows <= 4 ? 1024 : 256, x_pitch = divide_up(p.k, 16) * 16 + 16;
    const Scratch packed(Scratch::kRows, rows * x_pitch * 4), sums(Scratch::kTotals, 2 * rows * wide * 4);
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = p.x + (part.row + row) * a_.x_strides.row;
      float* to = packed.floats() + row * x_pitch;
      for (int64_t k = 0; k < p.k; ++k) to[k] = kernels::to_float(from[k * a_.x_strides.column]);
      std::fill(to + p.k, to + x_pitch, 0.0f);
    }
    float *chain = sums.floats(), *totals = chain + rows * wide;
    const int64_t end = std::min(part.panel_end * kPanel, p.n);
    for (int64_t column = part.panel * kPanel; column < end; column += wide) {
      const int64_t columns = std::min(wide, end - column);
      if (p.k == 0) std::fill_n(totals, rows * wide, 0.0f);
      for (int64_t k = 0; k < p.k; k += kChain) {
        float* to = k == 0 ? totals : chain;
        spread(p.w + column + k * a_.w_strides.column, a_.w_strides.column, columns, std::min(kChain, p.k - k),
               packed.floats() + k, x_pitch, rows, to, wide);
        if (k == 0) continue;
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t i = row * wide; i < row * wide + columns; i += kLanes) {
            store(totals + i, add(load(totals + i), load(chain + i)));
          }
        }
      }
      finish(p, part.row, column, totals, wide, rows, columns);
    }
  }

  void pack_panel(const Problem<T>& p, int64_t column, int64_t k, int64_t count, float* to) const {
    const auto& strides = a_.w_strides;
    for (int half = 0; half < 2; ++half) {
      const int64_t begin = std::min(column + half * kLanes, p.n), lanes = std::min<int64_t>(kLanes, p.n - begin);
      if (quantized_) {
        alignas(64) T rows[kLanes * kChain];
        {
          const Modes exact(false);
          for (int64_t i = 0; i < lanes; ++i) decode_row(a_.quantized, p.batch, begin + i, k, count, rows + i * kChain);
        }
        pack<false>(to + half * kLanes, kPanel, 0, rows, kChain, 1, lanes, count);
        continue;
      }
      pack<false>(to + half * kLanes, kPanel, 0, p.w + begin * strides.row + k * strides.column, strides.row,
                  strides.column, lanes, count);
    }
  }

  Prefetch ahead(const Problem<T>& p, int64_t column, int64_t k, int64_t columns, const Part& part) const {
    columns = std::min(columns, std::min(p.n, part.panel_end * kPanel) - column);
    const int64_t count = std::min(kChain, p.k - k), size = sizeof(T);
    if (columns <= 0) return {};
    if (quantized_) {
      const QuantizedWeight& w = a_.quantized;
      const int64_t per_byte = w.format == WeightFormat::kFp8 ? 1 : 2;
      return {w.codes + p.batch * w.codes_batch + column * w.codes_row + k / per_byte, w.codes_row, columns,
              (count + per_byte - 1) / per_byte};
    }
    const T* from = p.w + column * a_.w_strides.row + k * a_.w_strides.column;
    if (a_.w_strides.column == 1) return {from, a_.w_strides.row * size, columns, count * size};
    if (a_.w_strides.row == 1) return {from, a_.w_strides.column * size, count, columns * size};
    return {};
  }

  void scale(const Problem<T>& p, int64_t row, int64_t column, float* sums, int64_t pitch, int64_t rows,
             int64_t columns) const {
    const QuantizedWeight& w = a_.quantized;
    if (w.outer != nullptr) {
      const float* outer = w.outer + p.batch * w.outer_batch + column * w.outer_row;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c) sums[r * pitch + c] *= outer[c * w.outer_row];
    }
    if (a_.x_scales == nullptr) return;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c) sums[r * pitch + c] *= a_.x_scales[row + r];
  }

  void finish(const Problem<T>& p, int64_t row, int64_t column, float* sums, int64_t pitch, int64_t rows,
              int64_t columns) const {
    if (quantized_) scale(p, row, column, sums, pitch, rows, columns);
    const auto& strides = a_.out_strides;
    const T* bias = p.bias == nullptr ? nullptr : p.bias + row * a_.bias_strides.row + column * a_.bias_strides.column;
    const int64_t at = row * strides.row + column * strides.column;
    if (std::is_same_v<T, float> || a_.out_dtype == DType::kFloat32) {
      emit<kNative>(a_, sums, pitch, rows, columns, bias, reinterpret_cast<float*>(p.out) + at);
    } else {
      emit<kNative>(a_, sums, pitch, rows, columns, bias, reinterpret_cast<T*>(p.out) + at);
    }
  }

  const Matmul& a_;
  const bool quantized_;
};

// How a product is cut for `threads`: into rows x columns parts, so that the longest thread ends soonest. Every part
// packs its own x and w, which costs about as much as multiplying them by 8 columns, or rows, more.
struct Cut {
  int64_t rows = 1, columns = 1;
};
Cut cut(const Matmul& a, int64_t threads) {
  Cut best;
  double least = 0;
  const int64_t blocks = divide_up(a.m, kRows), panels = divide_up(a.n, kPanel);
  for (int64_t rows = 1; rows <= std::min(threads, blocks);
       rows = rows < threads && 2 * rows > threads ? threads : 2 * rows) {
    for (int64_t columns : {threads / rows, 2 * threads / rows, int64_t{1}}) {
      columns = std::clamp<int64_t>(columns, 1, panels);
      const double height = static_cast<double>(divide_up(blocks, rows) * kRows);
      const double width = static_cast<double>(divide_up(panels, columns) * kPanel);
      const auto rounds = static_cast<double>(divide_up(a.batch * rows * columns, threads));
      const double cost = rounds * (height + 8) * (width + 8);
      if (least == 0 || cost < least * 0.99) {
        least = cost;
        best = {rows, columns};
      }
    }
  }
  return best;
}

// Fused multiply-adds, in vectors, below which a second thread costs more than it brings.
constexpr double kSerial = 16384;

template <class T, class A>
void uniform(const Matmul& a, const Parallel& parallel) {
  const double work = static_cast<double>(a.batch) * static_cast<double>(a.m + 8) * static_cast<double>(a.n) *
                      static_cast<double>(a.k + 8) / (kLanes * kPerWord<T>);
  const int64_t threads = work < kSerial ? 1 : parallel.threads();
  const Cut parts = cut(a, threads);
  const int64_t blocks = divide_up(a.m, kRows), panels = divide_up(a.n, kPanel),
                tasks = a.batch * parts.rows * parts.columns;
  const auto task = [&](int64_t begin, int64_t end) {
    const Modes modes(kPerWord<T> == 2);
    Worker<T, A> worker(a);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t column = t % parts.columns, row = t / parts.columns % parts.rows;
      const auto p = problem<T>(a, t / parts.columns / parts.rows);
      worker.run(
          p, {std::min(a.m, blocks * row / parts.rows * kRows), std::min(a.m, blocks * (row + 1) / parts.rows * kRows),
              panels * column / parts.columns, panels * (column + 1) / parts.columns});
    }
  };
  if (threads == 1) return task(0, tasks);
  parallel.run(tasks, 1, task);
}

// Products of different sizes: every thread takes an equal share of their work, cut between panels.
template <class T, class A>
void ragged(const Matmul& a, const Parallel& parallel) {
  const auto panel_cost = [](const Problem<T>& p) { return p.m == 0 ? 0 : (p.m + 8) * (p.k + 8); };
  int64_t total = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const auto p = problem<T>(a, b);
    total += divide_up(p.n, kPanel) * panel_cost(p);
  }
  const bool alone = static_cast<double>(total) * kPanel / (kLanes * kPerWord<T>) < kSerial;
  const int64_t threads = alone ? 1 : parallel.threads();
  const auto task = [&](int64_t begin, int64_t end) {
    const Modes modes(kPerWord<T> == 2);
    Worker<T, A> worker(a);
    const auto from =
        static_cast<int64_t>(static_cast<double>(total) * static_cast<double>(begin) / static_cast<double>(threads));
    const auto to = end == threads ? total
                                   : static_cast<int64_t>(static_cast<double>(total) * static_cast<double>(end) /
                                                          static_cast<double>(threads));
    int64_t before = 0;
    for (int64_t b = 0; b < a.batch && before < to; ++b) {
      const auto p = problem<T>(a, b);
      const int64_t cost = panel_cost(p), panels = divide_up(p.n, kPanel);
      if (cost == 0 || panels == 0) continue;
      const int64_t first = std::clamp<int64_t>(divide_up(std::max<int64_t>(0, from - before), cost), 0, panels);
      const int64_t last = std::clamp<int64_t>(divide_up(std::max<int64_t>(0, to - before), cost), 0, panels);
      worker.run(p, {0, p.m, first, last});
      before += cost * panels;
    }
  };
  if (threads == 1) return task(0, 1);
  parallel.run(threads, 1, task);
}

// x and w exchanged, which changes no bit, where that fills more lanes or makes the results contiguous.
bool better_exchanged(const Matmul& a) {
  if (a.ragged != Ragged::kNone || a.quantized.format != WeightFormat::kPlain) return false;
  if (a.n <= kRows && a.m > 2 * a.n && a.m >= kLanes) return true;
  return a.out_strides.row == 1 && a.out_strides.column != 1 && a.m > kRows && a.n > kRows;
}
Matmul exchanged(Matmul a) {
  std::swap(a.x, a.w);
  std::swap(a.x_strides, a.w_strides);
  std::swap(a.m, a.n);
  std::swap(a.bias_strides.row, a.bias_strides.column);
  std::swap(a.out_strides.row, a.out_strides.column);
  return a;
}

template <class T, class A>
void product(const Matmul& a, const Parallel& parallel) {
  if (a.batch <= 0 || a.m < 0 || a.n < 0) return;
  if (a.ragged != Ragged::kNone) return ragged<T, A>(a, parallel);
  if (a.m == 0 || a.n == 0) return;
  if (better_exchanged(a)) return uniform<T, A>(exchanged(a), parallel);
  uniform<T, A>(a, parallel);
}

#if defined(__AVX512BF16__)
// vdpbf16ps is as fast as two fused multiply-adds on Zen 4 and slower on the Xeons that have it, where it pays only for
// what memory bounds.
bool dot_is_faster(const Matmul& a) {
  static const bool intel = __builtin_cpu_is("intel");
  return isa() == Isa::kAvx512Bf16 && (!intel || a.m <= 8);
}
#endif

}  // namespace

void matmul(const Matmul& a, const Parallel& parallel) {
  switch (a.dtype) {
    case DType::kFloat32:
      return product<float, FloatWords>(a, parallel);
    case DType::kFloat16:
      return product<Float16, FloatWords>(a, parallel);
    default:
#if defined(__AVX512BF16__)
      if (dot_is_faster(a)) return product<BFloat16, PairsByDot>(a, parallel);
#endif
      return product<BFloat16, PairsByFma>(a, parallel);
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
