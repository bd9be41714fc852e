// Work is cut into blocks of (sequence, key head, some query tokens); the query heads of a key head and the tokens are
// the rows of a block. Three steps: scores of all keys, their probabilities, the products with the values. Where there
// are few blocks the first step is split by keys and the last by value columns, which no sum notices.
#include "kernels/attention.h"

#include <atomic>

#include "kernels/cpu/attention_tiles.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

enum TileFlags : uint8_t { kSomeZero = 1, kSomeNonzero = 2 };

struct Block {
  int64_t sequence, kv_head, first_token, tokens, begin, end;  // keys [begin, end) are what any row may see
  int64_t score_stride, shared_scores;                         // of all blocks, where the work is split
};

// Queries and keys of one sequence.
struct Sequence {
  int64_t first_row, queries, first_key, keys, offset;  // keys [first_key, keys); offset: row of the first query's key
};
Sequence sequence_of(const Attention& a, int64_t b) {
  if (a.query_starts.data == nullptr) {
    const int64_t begin = a.key_begin.data != nullptr ? std::max<int64_t>(0, a.key_begin[b]) : 0;
    const int64_t end = a.key_end.data != nullptr ? std::min<int64_t>(a.keys, a.key_end[b]) : a.keys;
    return {0, a.queries, begin, std::max(begin, end), a.query_offset};
  }
  const int64_t first = a.query_starts[b], queries = a.query_starts[b + 1] - first, keys = a.key_counts[b];
  return {first, queries, 0, keys, keys - queries};
}

struct Range {
  int64_t begin, end;
};
// The keys that the query behind `token` others of the sequence may see, masks aside; none if begin >= end. Both grow
// with the token.
Range limits(const Attention& a, const Sequence& s, int64_t token) {
  const int64_t position = s.offset + token;
  Range r{s.first_key, s.keys};
  if (a.causal) r.end = std::max<int64_t>(0, std::min(s.keys, position + 1));
  if (a.window > 0) r.begin = std::max<int64_t>(s.first_key, position - a.window + 1);
  return r;
}
Range visible(const Attention& a, const Sequence& s, int64_t token) {
  const Range r = limits(a, s, token);
  return r.begin < r.end ? r : Range{0, 0};
}

// What a block needs while it is worked on, in the memory of the thread.
struct Rows {
  int64_t count, group;
  float* q;           // [count][head_size], times scale
  Range* seen;        // [count]
  const char** mask;  // [count], the mask of the row at key 0
  float* bias;        // [kTile]
  float* scores;      // [count][score_stride]; column 0 is key `begin` of the block
  float* sum;         // [count], the denominator; 0: no key was seen
  float* largest;     // [count]
  uint8_t* flags;     // [tiles]
  float* keys;        // [head_size][kTile]
  float* values;      // [kTile][width]
  float* out;         // [count][width]
};

int64_t mask_bytes(MaskKind kind) { return kind == MaskKind::kVisible ? 1 : kind == MaskKind::kFloat32 ? 4 : 2; }

// What the mask of a row adds to `n` scores from key `first` on.
template <class T>
void read_bias(const T* mask, int64_t stride, int64_t n, float* bias) {
  if (stride == 1) {
    for (int64_t j = 0; j < n; j += 16) store16(bias + j, load16(mask + j, n - j));
  } else {
    for (int64_t j = 0; j < n; ++j) bias[j] = kernels::to_float(mask[j * stride]);
  }
}
void read_bias(const Attention& a, const char* mask, int64_t first, int64_t n, float* bias) {
  const int64_t stride = a.mask_strides[3];
  mask += first * stride * mask_bytes(a.mask_kind);
  switch (a.mask_kind) {
    case MaskKind::kNone:
      return;
    case MaskKind::kVisible:
      for (int64_t j = 0; j < n; ++j) bias[j] = mask[j * stride] != 0 ? 0.0f : -kInf;
      return;
    case MaskKind::kFloat32:
      return read_bias(reinterpret_cast<const float*>(mask), stride, n, bias);
    case MaskKind::kFloat16:
      return read_bias(reinterpret_cast<const Float16*>(mask), stride, n, bias);
    case MaskKind::kBFloat16:
      return read_bias(reinterpret_cast<const BFloat16*>(mask), stride, n, bias);
  }
}

template <class T>
class Worker {
 public:
  Worker(const Attention& a, int64_t value_stride) : a_(a), group_(a.heads / a.kv_heads), value_stride_(value_stride) {}

  int64_t bytes_of(const Block& block, bool own_scores) const {
    const int64_t rows = block.tokens * group_, tiles = (block.end - block.begin + kTile - 1) / kTile;
    int64_t bytes = 0;
    for (const int64_t part : {rows * a_.head_size * 4, rows * int64_t{sizeof(Range)}, rows * 8, kTile * 4,
                               own_scores ? rows * block.score_stride * 4 : 0, rows * 4, rows * 4, tiles,
                               a_.head_size * kTile * 4, kTile * value_stride_ * 4, rows * value_stride_ * 4}) {
      bytes += round_up(part, 64);
    }
    return bytes;
  }

  // Lays the rows of the block out in `memory` and prepares queries, visible ranges and masks.
  Rows prepare(const Block& block, char* memory, float* shared_scores) const {
    Rows r{};
    r.group = group_;
    r.count = block.tokens * group_;
    const auto take = [&](int64_t bytes) {
      char* part = memory;
      memory += round_up(bytes, 64);
      return part;
    };
    r.q = reinterpret_cast<float*>(take(r.count * a_.head_size * 4));
    r.seen = reinterpret_cast<Range*>(take(r.count * int64_t{sizeof(Range)}));
    r.mask = reinterpret_cast<const char**>(take(r.count * 8));
    r.bias = reinterpret_cast<float*>(take(kTile * 4));
    r.scores = shared_scores != nullptr ? shared_scores + block.shared_scores
                                        : reinterpret_cast<float*>(take(r.count * block.score_stride * 4));
    r.sum = reinterpret_cast<float*>(take(r.count * 4));
    r.largest = reinterpret_cast<float*>(take(r.count * 4));
    r.flags = reinterpret_cast<uint8_t*>(take((block.end - block.begin + kTile - 1) / kTile));
    r.keys = reinterpret_cast<float*>(take(a_.head_size * kTile * 4));
    r.values = reinterpret_cast<float*>(take(kTile * value_stride_ * 4));
    r.out = reinterpret_cast<float*>(take(r.count * value_stride_ * 4));

    const Sequence sequence = sequence_of(a_, block.sequence);
    const Vec16 scale = broadcast16(a_.scale);
    for (int64_t row = 0; row < r.count; ++row) {
      const int64_t token = block.first_token + row / group_, head = block.kv_head * group_ + row % group_;
      const T* q = static_cast<const T*>(a_.q) + block.sequence * a_.q_strides.batch + head * a_.q_strides.head +
                   (sequence.first_row + token) * a_.q_strides.row;
      for (int64_t d = 0; d < a_.head_size; d += 16) {
        const int64_t n = a_.head_size - d;
        store16(r.q + row * a_.head_size + d, mul(load16(q + d, n), scale), n);
      }
      r.seen[row] = visible(a_, sequence, token);
      r.mask[row] = static_cast<const char*>(a_.mask);
      if (a_.mask_kind != MaskKind::kNone) {
        r.mask[row] += (block.sequence * a_.mask_strides[0] + head * a_.mask_strides[1] + token * a_.mask_strides[2]) *
                       mask_bytes(a_.mask_kind);
      }
    }
    return r;
  }

  // Scores of the keys [begin, end) of the block; begin is a multiple of kTile behind the block's.
  void scores(const Block& block, const Rows& r, int64_t begin, int64_t end) const {
    const T* keys[kTile + kAhead];
    for (int64_t first = begin; first < end; first += kTile) {
      const int64_t n = std::min(kTile, end - first), whole = round_up(n, kLanes);
      float* scores = r.scores + (first - block.begin);
      if (hidden(r, first, n)) {
        for (int64_t row = 0; row < r.count; ++row) fill(scores + row * block.score_stride, kTile, -kInf);
        continue;
      }
      const bool few = r.count <= kFewRows;
      const int64_t known = few ? std::min(kTile + kAhead, end - first) : n;  // the next tile's keys are prefetched
      locate(a_.k, a_.k_strides, block, first, known, keys);
      for (int64_t j = known; j < round_up(known, kLanes); ++j) keys[j] = keys[known - 1];
      if (few) {
        for (int64_t j = 0; j < whole; j += kLanes) {
          few_scores_of<T>(r.count, r.q, a_.head_size, keys + j,
                           j + kAhead + kLanes <= known ? keys + j + kAhead : nullptr, a_.head_size, scores + j,
                           block.score_stride);
        }
      } else {
        pack_keys<T>(keys, whole, a_.head_size, r.keys);
        for (int64_t row = 0; row < r.count; row += kRows) {
          const int64_t rows = std::min<int64_t>(kRows, r.count - row);
          if (seen_by(r, row, rows).end <= first) continue;  // finish() writes -inf
          product<true>(rows, whole, r.q + row * a_.head_size, a_.head_size, a_.head_size, Packed{r.keys, kTile},
                        scores + row * block.score_stride, block.score_stride);
        }
      }
      for (int64_t row = 0; row < r.count; ++row) finish(r, row, first, n, scores + row * block.score_stride);
    }
  }

  // Turns scores into probabilities in place (of `r` into `p`, which may be the same) and sums them.
  void probabilities(const Block& block, const Rows& r, float* probabilities) const {
    const int64_t n = block.end - block.begin, padded = round_up(n, kTile);
    memset(r.flags, 0, static_cast<size_t>(padded / kTile));
    for (int64_t row = 0; row < r.count; ++row) {
      const float* s = r.scores + row * block.score_stride;
      float* p = probabilities + row * block.score_stride;
      Vec16 lanes = broadcast16(-kInf);
      for (int64_t j = 0; j < padded; j += 16) lanes = max(lanes, load16(s + j));
      float maxima[16], largest = -kInf;
      store16(maxima, lanes);
      for (const float lane : maxima) largest = lane > largest || lane != lane ? lane : largest;
      const int64_t head = block.kv_head * group_ + row % group_;
      const float sink = a_.sinks != nullptr ? a_.sinks[head] : -kInf;
      if (sink > largest) largest = sink;
      if (largest == -kInf) largest = 0;

      ExactSum sum;
      bool nan = false;
      const Vec shift = broadcast(largest);
      for (int64_t tile = 0; tile < padded; tile += kTile) {
        uint32_t zeros = 0, others = 0;
        for (int64_t j = tile; j < tile + kTile; j += kLanes) {
          const Vec value = exp(sub(load(s + j), shift));
          store(p + j, value);
          sum.add(value);
          const uint32_t inside = n - j >= kLanes ? ~0u : n > j ? (1u << (n - j)) - 1u : 0u;
          const uint32_t zero_lanes = bits_of(equal(value, zero()));
          zeros |= zero_lanes & inside;
          others |= ~zero_lanes & inside & ((1u << kLanes) - 1u);
          nan |= bits_of(is_nan(value)) != 0;
        }
        r.flags[tile / kTile] |= static_cast<uint8_t>((zeros != 0 ? kSomeZero : 0) | (others != 0 ? kSomeNonzero : 0));
      }
      double total = sum.total();
      if (a_.sinks != nullptr) total += static_cast<double>(exp_f32(sink - largest));
      r.sum[row] = nan || sink != sink ? float_of_bits(kQuietNan) : static_cast<float>(total);
      r.largest[row] = largest;
    }
  }

  // Columns [begin, end) of the values, and the outputs.
  void values(const Block& block, const Rows& r, const float* p, int64_t begin, int64_t end) const {
    const int64_t width = end - begin, stride = round_up(width, kLanes);
    const bool in_place = r.count <= kFewRows && width % kLanes == 0;
    const T* values[kTile + kAhead];
    memset(r.out, 0, static_cast<size_t>(r.count * stride) * sizeof(float));
    for (int64_t first = block.begin; first < block.end; first += kTile) {
      const int64_t n = std::min(kTile, block.end - first), column = first - block.begin;
      const uint8_t flags = r.flags[column / kTile];
      if ((flags & kSomeNonzero) == 0) continue;
      const int64_t known = in_place ? std::min(n + kAhead, block.end - first) : n;
      locate(a_.v, a_.v_strides, block, first, known, values);
      for (int64_t j = 0; j < known; ++j) values[j] += begin;
      const bool zeros = (flags & kSomeZero) != 0;
      if (in_place && !zeros) {
        // Few keys at a time where a row does not fit one pass over the columns: what the next pass reads is near.
        const int64_t part = width > kColumns * kLanes ? 16 : kTile;
        for (int64_t j = 0; j < n; j += part) {
          for (int64_t row = 0; row < r.count; row += kRows) {
            product<false>(std::min<int64_t>(kRows, r.count - row), width, p + row * block.score_stride + column + j,
                           block.score_stride, std::min(part, n - j), Scattered<T>{values + j, known - j},
                           r.out + row * stride, stride);
          }
        }
        continue;
      }
      const bool finite = pack_values<T>(values, n, width, r.values, stride);
      for (int64_t row = 0; row < r.count; row += kRows) {
        const int64_t rows = std::min<int64_t>(kRows, r.count - row);
        const Range seen = seen_by(r, row, rows);
        // Keys that no row of these sees have p = 0 and change nothing; neither do others with p = 0, if v is finite.
        const int64_t skip = std::max<int64_t>(0, std::min(n, seen.begin - first)),
                      stop = std::min(n, seen.end - first);
        if (stop <= skip) continue;
        const float* weights = p + row * block.score_stride + column + skip;
        float* out = r.out + row * stride;
        const float* packed = r.values + skip * stride;
        if (finite || !zeros) {
          product<false>(rows, stride, weights, block.score_stride, stop - skip, Packed{packed, stride}, out, stride);
        } else {
          careful(rows, stride, weights, block.score_stride, stop - skip, packed, out);
        }
      }
    }
    write(block, r, begin, end, stride);
  }

 private:
  // Pointers to `n` rows of k or v from key `first` on.
  void locate(const void* base, const AttentionStrides& strides, const Block& block, int64_t first, int64_t n,
              const T** rows) const {
    const T* head = static_cast<const T*>(base) + block.kv_head * strides.head;
    if (a_.block_table.data == nullptr) {
      head += block.sequence * strides.batch + first * strides.row;
      for (int64_t j = 0; j < n; ++j) rows[j] = head + j * strides.row;
      return;
    }
    const int64_t table = block.sequence * a_.block_table_stride;
    for (int64_t j = 0; j < n;) {
      const int64_t key = first + j, slot = key % a_.block_size, run = std::min(n - j, a_.block_size - slot);
      const T* row = head + a_.block_table[table + key / a_.block_size] * strides.batch + slot * strides.row;
      for (int64_t i = 0; i < run; ++i) rows[j + i] = row + i * strides.row;
      j += run;
    }
  }

  static Range seen_by(const Rows& r, int64_t row, int64_t rows) {
    Range all = r.seen[row];
    for (int64_t i = row + 1; i < row + rows; ++i) {
      if (r.seen[i].begin >= r.seen[i].end) continue;
      if (all.begin >= all.end) all = r.seen[i];
      all = {std::min(all.begin, r.seen[i].begin), std::max(all.end, r.seen[i].end)};
    }
    return all;
  }

  static void fill(float* values, int64_t n, float value) {
    for (int64_t j = 0; j < n; j += kLanes) store(values + j, broadcast(value));
  }

  // Whether the mask hides a tile from every row.
  bool hidden(const Rows& r, int64_t first, int64_t n) const {
    if (a_.mask_kind == MaskKind::kNone) return false;
    for (int64_t row = 0; row < r.count; ++row) {
      if (row > 0 && r.mask[row] == r.mask[row - 1]) continue;
      read_bias(a_, r.mask[row], first, n, r.bias);
      for (int64_t j = 0; j < n; j += kLanes) {
        const uint32_t inside = n - j >= kLanes ? (1u << kLanes) - 1u : (1u << (n - j)) - 1u;
        if ((~bits_of(equal(load(r.bias + j), broadcast(-kInf))) & inside) != 0) return false;
      }
    }
    return true;
  }

  // Soft cap, bias and what may not be seen, on one row of a tile.
  void finish(const Rows& r, int64_t row, int64_t first, int64_t n, float* scores) const {
    if (a_.soft_cap > 0) {
      const Vec cap = broadcast(a_.soft_cap), inverse = broadcast(1.0f / a_.soft_cap);
      for (int64_t j = 0; j < n; j += kLanes) store(scores + j, mul(cap, tanh(mul(load(scores + j), inverse))));
    }
    if (a_.mask_kind != MaskKind::kNone) {
      if (row == 0 || r.mask[row] != r.mask[row - 1]) read_bias(a_, r.mask[row], first, n, r.bias);
      for (int64_t j = 0; j < n; j += kLanes) {
        const Vec bias = load(r.bias + j);  // a hidden key has the score -inf, even if it is NaN
        store(scores + j, select(equal(bias, broadcast(-kInf)), bias, add(load(scores + j), bias)));
      }
    }
    const int64_t begin = r.seen[row].begin - first, end = std::min(r.seen[row].end - first, n);
    for (int64_t j = 0; j < kTile; j += kLanes) {
      if (begin <= j && j + kLanes <= end) continue;
      Vec value = select(first_lanes(end - j), load(scores + j), broadcast(-kInf));
      value = select(first_lanes(begin - j), broadcast(-kInf), value);
      store(scores + j, value);
    }
  }
  static Mask first_lanes(int64_t count) {
    return QUARTZ_ISA::first(std::max<int64_t>(0, std::min<int64_t>(count, kLanes)));
  }

  // As product(), but a key with p = 0 is left out.
  static void careful(int64_t rows, int64_t columns, const float* p, int64_t ldp, int64_t n, const float* values,
                      float* out) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t k = 0; k < n; ++k) {
        const float weight = p[row * ldp + k];
        if (weight == 0) continue;
        const Vec x = broadcast(weight);
        for (int64_t d = 0; d < columns; d += kLanes) {
          float* sum = out + row * columns + d;
          store(sum, fma(x, load(values + k * columns + d), load(sum)));
        }
      }
    }
  }

  void write(const Block& block, const Rows& r, int64_t begin, int64_t end, int64_t stride) const {
    const int64_t first_row = sequence_of(a_, block.sequence).first_row + block.first_token;
    const Vec16 nan = broadcast16(float_of_bits(kQuietNan));
    for (int64_t row = 0; row < r.count; ++row) {
      const int64_t head = block.kv_head * group_ + row % group_, token = first_row + row / group_;
      const auto place = [&](const AttentionStrides& strides) {
        return block.sequence * strides.batch + head * strides.head + token * strides.row;
      };
      T* out = static_cast<T*>(a_.out) + place(a_.out_strides) + begin;
      const Vec16 sum = broadcast16(r.sum[row] == 0 ? 1.0f : r.sum[row]);
      for (int64_t d = 0; d < end - begin; d += 16) {
        const int64_t n = end - begin - d;
        Vec16 value = div(add(load16(r.out + row * stride + d, std::min<int64_t>(n, stride - d)), zero16()), sum);
        QUARTZ_PARTS value.part[i] = select(is_nan(value.part[i]), nan.part[i], value.part[i]);  // one NaN for all
        store16(out + d, value, n);
      }
      if (a_.logsumexp != nullptr && begin == 0) {
        const float sum_of_row = r.sum[row];
        a_.logsumexp[place(a_.logsumexp_strides)] = sum_of_row == 0 ? -kInf : r.largest[row] + log_f32(sum_of_row);
      }
    }
  }

  const Attention& a_;
  const int64_t group_, value_stride_;
};

// Runs use(i) for i = 0 to count - 1, each on one thread, the next one free.
template <class Use>
void for_each(const Parallel& parallel, int64_t count, bool serial, Use use) {
  if (serial || count <= 1 || parallel.threads() <= 1) {
    for (int64_t i = 0; i < count; ++i) use(i);
    return;
  }
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(parallel.threads(), count);
  parallel.run(workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
           i = next.fetch_add(1, std::memory_order_relaxed)) {
        use(i);
      }
    }
  });
}

constexpr int64_t kRowsOfBlock = 48;
constexpr int64_t kScoresOfBlock = 196608;  // floats: about what the second cache holds
constexpr int64_t kKeptScratch = 8 << 20;   // bytes a thread keeps

Scratch& scratch() {
  static thread_local Scratch memory;
  return memory;
}

int64_t tokens_of_block(int64_t group, int64_t keys) {
  const int64_t rows = std::max<int64_t>(kRows, std::min(kRowsOfBlock, kScoresOfBlock / std::max<int64_t>(1, keys)));
  return std::max<int64_t>(1, rows / group);
}

template <class T>
void typed(const Attention& a, const Parallel& parallel) {
  const int64_t group = a.heads / a.kv_heads;
  int64_t count = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_of(a, b);
    const int64_t tokens = tokens_of_block(group, s.keys);
    count += a.kv_heads * ((s.queries + tokens - 1) / tokens);
  }
  if (count == 0) return;
  Scratch plan;
  auto* blocks = reinterpret_cast<Block*>(plan.get(count * static_cast<int64_t>(sizeof(Block))));
  int64_t made = 0, work = 0, shared = 0, most_rows = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_of(a, b);
    const int64_t tokens = tokens_of_block(group, s.keys);
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      for (int64_t end = s.queries; end > 0; end -= tokens) {  // the last blocks have the most keys: they go first
        Block& block = blocks[made++];
        block.sequence = b;
        block.kv_head = h;
        block.first_token = std::max<int64_t>(0, end - tokens);
        block.tokens = end - block.first_token;
        block.end = limits(a, s, end - 1).end;
        block.begin = std::min(limits(a, s, block.first_token).begin, block.end);
        const int64_t rows = block.tokens * group;
        block.score_stride = round_up(block.end - block.begin, kTile) + 16;
        block.shared_scores = shared;
        shared += rows * block.score_stride;
        work += rows * (block.end - block.begin) * (a.head_size + a.value_size);
        most_rows = std::max(most_rows, rows);
      }
    }
  }
  const bool serial = work < 100000;
  const int threads = parallel.threads();
  const bool split = !serial && threads > 1 && count < 3 * threads && shared < (int64_t{1} << 26);
  if (!split) {
    const Worker<T> worker(a, round_up(a.value_size, kLanes));
    for_each(parallel, count, serial, [&](int64_t i) {
      const Block& block = blocks[i];
      const Rows rows = worker.prepare(block, scratch().get(worker.bytes_of(block, true)), nullptr);
      worker.scores(block, rows, block.begin, block.end);
      worker.probabilities(block, rows, rows.scores);
      worker.values(block, rows, rows.scores, 0, a.value_size);
      scratch().trim(kKeptScratch);
    });
    return;
  }

  // Scores by block and span of keys, then values by block and slice of columns.
  constexpr int64_t kSpan = 4 * kTile;
  Scratch shared_memory;
  auto* shared_scores = reinterpret_cast<float*>(shared_memory.get(shared * 4));
  int64_t most_keys = 1;
  for (int64_t i = 0; i < count; ++i) most_keys = std::max(most_keys, blocks[i].end - blocks[i].begin);
  const int64_t spans = (most_keys + kSpan - 1) / kSpan;
  const int64_t wanted = (4 * threads + count - 1) / count;
  const int64_t slice = std::max<int64_t>(32, round_up((a.value_size + wanted - 1) / wanted, 32));
  const int64_t slices = std::max<int64_t>(1, (a.value_size + slice - 1) / slice);
  const Worker<T> worker(a, round_up(std::min(slice, a.value_size), kLanes));
  for_each(parallel, count * spans, false, [&](int64_t i) {
    const Block& block = blocks[i / spans];
    const int64_t begin = block.begin + i % spans * kSpan, end = std::min(begin + kSpan, block.end);
    if (begin >= end) return;
    const Rows rows = worker.prepare(block, scratch().get(worker.bytes_of(block, false)), shared_scores);
    worker.scores(block, rows, begin, end);
  });
  for_each(parallel, count * slices, false, [&](int64_t i) {
    const Block& block = blocks[i / slices];
    const int64_t begin = i % slices * slice, end = std::min(begin + slice, a.value_size);
    const int64_t scores = block.tokens * group * block.score_stride * 4, rest = worker.bytes_of(block, false);
    char* memory = scratch().get(scores + 64 + rest);
    const Rows rows = worker.prepare(block, memory + round_up(scores, 64), shared_scores);
    auto* p = reinterpret_cast<float*>(memory);
    worker.probabilities(block, rows, p);
    worker.values(block, rows, p, begin, end);
    scratch().trim(kKeptScratch);
  });
}

}  // namespace

void attention(const Attention& a, const Parallel& parallel) {
  switch (a.dtype) {
    case DType::kFloat32:
      return typed<float>(a, parallel);
    case DType::kFloat16:
      return typed<Float16>(a, parallel);
    default:
      return typed<BFloat16>(a, parallel);
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
