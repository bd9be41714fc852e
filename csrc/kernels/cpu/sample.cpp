#include "kernels/sample.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr int64_t kBlock = 128;  // values with a common maximum
constexpr int kBins = 2048;

// (value descending, id ascending) as descending integers.
QUARTZ_INLINE uint64_t key_of(float x, int64_t id) {
  return static_cast<uint64_t>(order_of(x)) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}
QUARTZ_INLINE float value_of(uint64_t key) { return float_of_order(static_cast<uint32_t>(key >> 32)); }
QUARTZ_INLINE uint32_t id_of(uint64_t key) { return ~static_cast<uint32_t>(key); }

template <int N>
QUARTZ_INLINE void philox_groups(const TokenNoise& noise, uint32_t group, uint32_t (&words)[4][N]) {
  for (int i = 0; i < N; ++i) {
    const PhiloxWords block = noise.words(group + static_cast<uint32_t>(i));
    for (int j = 0; j < 4; ++j) words[j][i] = block.word[j];
  }
}

// As Row::nucleus for a list of all tokens that `cut` keeps; sorts it.
QUARTZ_INLINE Cut nucleus_of(std::vector<uint64_t>& tokens, Cut cut, float top_p, float largest,
                             float inverse_temperature) {
  std::sort(tokens.begin(), tokens.end(), std::greater<uint64_t>());
  const auto mass = [&](uint64_t key) { return mass_of(scaled(value_of(key), largest, inverse_temperature)); };
  uint64_t sum = 0, before = 0;
  for (const uint64_t key : tokens) sum += mass(key);
  const uint64_t limit = mass_limit(top_p, sum);
  for (const uint64_t key : tokens) {
    before += mass(key);
    if (before >= limit) return {value_of(key), id_of(key)};
  }
  return cut;
}

#if defined(__AVX512F__)
QUARTZ_INLINE IVec truncated(Vec a) { return _mm512_cvttps_epi32(a); }
QUARTZ_INLINE void store_int(int32_t* p, IVec a) { _mm512_store_si512(p, a); }
#else
QUARTZ_INLINE IVec truncated(Vec a) { return _mm256_cvttps_epi32(a); }
QUARTZ_INLINE void store_int(int32_t* p, IVec a) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), a); }
#endif

// One row at a time; the memory is kept for the next.
class Row {
 public:
  float largest = kMinusInfinity;
  uint32_t largest_id = 0;

  // Steps 1 to 4, or step 1 alone.
  template <class T>
  void load(const Sample& a, int64_t row, bool raw) {
    const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
    size_ = a.vocabulary;
    const int64_t blocks = (size_ + kBlock - 1) / kBlock;
    values_.resize(blocks * kBlock);
    maxima_.resize(blocks);
    const Vec nothing = broadcast(kMinusInfinity), most = broadcast(kLargest);
    for (int64_t i = 0; i < size_; i += kLanes) {
      const int64_t n = size_ - i;
      Vec x = n >= kLanes ? QUARTZ_ISA::load(logits + i) : QUARTZ_ISA::load(logits + i, first(n));
      x = add(min(most, select(is_nan(x), nothing, x)), zero());
      store(values_.data() + i, n >= kLanes ? x : select(first(n), x, nothing));
    }
    for (int64_t i = (size_ + kLanes - 1) / kLanes * kLanes; i < blocks * kBlock; ++i) values_[i] = kMinusInfinity;
    if (!raw) {
      const RowInputs inputs(a, row);
      process(inputs);
      const auto redo = [&](const int64_t* ids, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          if (ids[i] >= 0 && ids[i] < size_) values_[ids[i]] = inputs.value(kernels::to_float(logits[ids[i]]), ids[i]);
        }
      };
      redo(inputs.bias_ids, inputs.bias_width);
      redo(inputs.pending, inputs.pending_width);
    }
    largest = kMinusInfinity;
    largest_id = 0;
    for (int64_t b = 0; b < blocks; ++b) {
      const float* x = values_.data() + b * kBlock;
      Vec top = nothing;
      for (int64_t i = 0; i < kBlock; i += kLanes) top = max(top, QUARTZ_ISA::load(x + i));
      alignas(64) float lanes[kLanes];
      store(lanes, top);
      maxima_[b] = *std::max_element(lanes, lanes + kLanes);
      if (maxima_[b] > largest) {
        largest = maxima_[b];
        largest_id = static_cast<uint32_t>(b * kBlock + (std::find(x, x + kBlock, largest) - x));
      }
    }
  }

  // The first `count` of the tokens that `cut` keeps, in any order in `tokens`; returns where they end.
  Cut first_tokens(Cut cut, int64_t count, std::vector<uint64_t>& tokens) {
    float low = cut.value;
    if (count <= static_cast<int64_t>(maxima_.size())) {  // at least `count` values are no smaller than this one
      sorted_.assign(maxima_.begin(), maxima_.end());
      std::nth_element(sorted_.begin(), sorted_.begin() + (count - 1), sorted_.end(), std::greater<float>());
      low = std::max(low, sorted_[count - 1]);
    }
    collect(cut, low, tokens);
    if (static_cast<int64_t>(tokens.size()) < count) return cut;
    std::nth_element(tokens.begin(), tokens.begin() + (count - 1), tokens.end(), std::greater<uint64_t>());
    tokens.resize(count);
    return {value_of(tokens[count - 1]), id_of(tokens[count - 1])};
  }

  // Where less than top_p of the mass of the kept tokens lies before a token no longer.
  Cut nucleus(Cut cut, float top_p, float inverse_temperature) {
    const float low = std::max(cut.value, lowest_value(largest, inverse_temperature, kMasslessBelow));
    const float range = largest - low;
    const float scale = range > 0.0f && range <= kLargest ? std::min(kBins / range, 1e30f) : 0.0f;
    // Without branches on the values, which no processor could predict; what is not kept weighs 0.
    const Vec top = broadcast(largest), bottom = broadcast(low), last = broadcast(kBins - 1), scales = broadcast(scale);
    const auto bins_at = [&](int64_t i) {
      return truncated(min(last, mul(sub(top, max(bottom, QUARTZ_ISA::load(values_.data() + i))), scales)));
    };
    bins_.assign(kBins, 0);
    uint64_t sum = 0;
    alignas(64) int32_t bins[kBlock], whole[kBlock], rest[kBlock];
    for (size_t b = 0; b < maxima_.size(); ++b) {
      if (maxima_[b] < low) continue;
      const int64_t begin = static_cast<int64_t>(b) * kBlock;
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Masses masses = masses_at(begin + i, inverse_temperature);
        store_int(bins + i, bins_at(begin + i));
        store_int(whole + i, masses.whole);
        store_int(rest + i, masses.rest);
      }
      for (int64_t i = 0; i < kBlock; ++i) {
        const uint64_t kept = cut.keeps(values_[begin + i], static_cast<uint32_t>(begin + i)) ? ~uint64_t{0} : 0;
        const uint64_t mass = ((static_cast<uint64_t>(whole[i]) << 20) + static_cast<uint64_t>(rest[i])) & kept;
        bins_[bins[i]] += mass;
        sum += mass;
      }
    }
    const uint64_t limit = mass_limit(top_p, sum);
    uint64_t before = 0;
    int bin = 0;
    while (before + bins_[bin] < limit) before += bins_[bin++];
    std::vector<uint64_t>& members = members_;
    members.clear();
    for (size_t b = 0; b < maxima_.size(); ++b) {
      if (maxima_[b] < low) continue;
      const int64_t begin = static_cast<int64_t>(b) * kBlock;
      for (int64_t i = 0; i < kBlock; i += kLanes) store_int(bins + i, bins_at(begin + i));
      for (int64_t i = 0; i < kBlock; ++i) {
        const float x = values_[begin + i];
        if (bins[i] != bin || x < low || !cut.keeps(x, static_cast<uint32_t>(begin + i))) continue;
        members.push_back(key_of(x, begin + i));
      }
    }
    // Partially sorted as far as needed: a bin may hold the whole vocabulary.
    for (auto begin = members.begin(); begin != members.end();) {
      const auto end =
          begin + std::min<int64_t>(members.end() - begin, std::max<int64_t>(256, begin - members.begin()));
      std::partial_sort(begin, end, members.end(), std::greater<uint64_t>());
      for (; begin != end; ++begin) {
        before += mass_of(scaled(value_of(*begin), largest, inverse_temperature));
        if (before >= limit) return {value_of(*begin), id_of(*begin)};
      }
    }
    return cut;
  }

  uint64_t mass(Cut cut, float inverse_temperature) const {
    const Vec low = broadcast(std::max(cut.value, lowest_value(largest, inverse_temperature, kMasslessBelow)));
    uint64_t sum = 0;
    for (size_t b = 0; b < maxima_.size(); ++b) {
      if (maxima_[b] < cut.value) continue;
      const int64_t begin = static_cast<int64_t>(b) * kBlock;
      IVec whole = broadcast_int(0), rest = whole;  // at most 16 summands of 2^20
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        const Masses masses = masses_at(begin + i, inverse_temperature);
        const Mask below = less(QUARTZ_ISA::load(values_.data() + begin + i), low);
        whole = add(whole, as_int(select(below, zero(), as_float(masses.whole))));
        rest = add(rest, as_int(select(below, zero(), as_float(masses.rest))));
      }
      alignas(64) int32_t whole_lanes[kLanes], rest_lanes[kLanes];
      store_int(whole_lanes, whole);
      store_int(rest_lanes, rest);
      for (int j = 0; j < kLanes; ++j) {
        sum += (static_cast<uint64_t>(whole_lanes[j]) << 20) + static_cast<uint64_t>(rest_lanes[j]);
      }
    }
    if (cut.id < size_ - 1) {  // equal values behind the last one that is kept
      const float z = scaled(cut.value, largest, inverse_temperature);
      sum -= mass_of(z) * std::count(values_.begin() + cut.id + 1, values_.begin() + size_, cut.value);
    }
    return sum;
  }

  int64_t draw(Cut cut, float inverse_temperature, const TokenNoise& noise) const {
    float best = noise.gumbel(largest_id);
    uint32_t best_id = largest_id;
    constexpr int kGroups = 16;  // Philox blocks at a time
    alignas(64) uint32_t words[4][kGroups];
    for (int64_t begin = 0; begin < size_; begin += 4 * kGroups) {
      if (!cut.keeps(maxima_[begin / kBlock], 0)) continue;
      philox_groups(noise, static_cast<uint32_t>(begin / 4), words);
      const float* x = values_.data() + begin;
      for (int i = 0; i < 4 * kGroups; ++i) {
        const uint32_t word = words[i % 4][i / 4];
        const float z = scaled(x[i], largest, inverse_temperature);
        const auto id = static_cast<uint32_t>(begin + i);
        if (z + TokenNoise::gumbel_bound(word) < best || !cut.keeps(x[i], id)) continue;
        const float score = z + noise.gumbel(id, word);
        if (score > best || (score == best && id < best_id)) {
          best = score;
          best_id = id;
        }
      }
    }
    return best_id;
  }
  int64_t draw(const std::vector<uint64_t>& tokens, Cut cut, float inverse_temperature, const TokenNoise& noise) const {
    float best = kMinusInfinity;
    uint32_t best_id = 0xffffffffu;
    for (const uint64_t key : tokens) {
      const uint32_t id = id_of(key);
      if (!cut.keeps(value_of(key), id)) continue;
      const float score = scaled(value_of(key), largest, inverse_temperature) + noise.gumbel(id);
      if (score > best || (score == best && id < best_id)) {
        best = score;
        best_id = id;
      }
    }
    return best_id;
  }

  float value(int64_t id) const { return values_[id]; }

 private:
  void process(const RowInputs& inputs) {
    if (inputs.counts == nullptr && inputs.prompt_mask == nullptr) {
      if (inputs.bitmask == nullptr) return;
      for (int64_t word = 0; word * 32 < size_; ++word) {
        const auto bits = static_cast<uint32_t>(inputs.bitmask[word]);
        if (bits == 0xffffffffu) continue;
        const int64_t end = std::min<int64_t>(32, size_ - word * 32);
        for (int64_t i = 0; i < end; ++i) {
          if (((bits >> i) & 1u) == 0) values_[word * 32 + i] = kMinusInfinity;
        }
      }
      return;
    }
    for (int64_t id = 0; id < size_; ++id) values_[id] = inputs.dense_value(values_[id], id);
  }

  // The keys of the tokens that `cut` keeps with x >= low.
  void collect(Cut cut, float low, std::vector<uint64_t>& tokens) const {
    tokens.clear();
    for (size_t b = 0; b < maxima_.size(); ++b) {
      if (maxima_[b] < low) continue;
      for (int64_t id = static_cast<int64_t>(b) * kBlock; id < static_cast<int64_t>(b + 1) * kBlock; ++id) {
        const float x = values_[id];
        if (x >= low && cut.keeps(x, static_cast<uint32_t>(id))) tokens.push_back(key_of(x, id));
      }
    }
  }

  // mass_of, in two words of 20 bits.
  struct Masses {
    IVec whole, rest;
  };
  Masses masses_at(int64_t i, float inverse_temperature) const {
    const Vec x = QUARTZ_ISA::load(values_.data() + i);
    const Vec high = mul(exp(mul(sub(x, broadcast(largest)), broadcast(inverse_temperature))), broadcast(0x1p+20f));
    const IVec whole = truncated(high);
    return {whole, truncated(mul(sub(high, QUARTZ_ISA::to_float(whole)), broadcast(0x1p+20f)))};
  }

  int64_t size_ = 0;
  std::vector<float> values_, maxima_, sorted_;
  std::vector<uint64_t> bins_, members_;
};

template <class T>
void sample_row(const Sample& a, int64_t r, Row& row, std::vector<uint64_t>& tokens) {
  row.load<T>(a, r, false);
  int64_t token = -1;
  float logprob = kMinusInfinity;
  if (row.largest > kMinusInfinity) {
    const RowRules rules(a, r);
    const float inverse = rules.inverse_temperature;
    Cut cut;
    token = row.largest_id;
    if (!rules.greedy) {
      const TokenNoise noise(a.seeds != nullptr ? a.seeds[r] : 0, a.positions != nullptr ? a.positions[r] : 0,
                             a.samples != nullptr ? a.samples[r] : 0);
      if (rules.lowest_z > kMinusInfinity) cut.value = lowest_value(row.largest, inverse, rules.lowest_z);
      if (rules.top_k > 0) {
        cut = row.first_tokens(cut, rules.top_k, tokens);
        if (rules.top_p < 1.0f) cut = nucleus_of(tokens, cut, rules.top_p, row.largest, inverse);
        token = row.draw(tokens, cut, inverse, noise);
      } else {
        if (rules.top_p < 1.0f) cut = row.nucleus(cut, rules.top_p, inverse);
        token = row.draw(cut, inverse, noise);
      }
    }
    if (a.logprobs != nullptr) {
      logprob = scaled(row.value(token), row.largest, inverse) - log_of_mass(row.mass(cut, inverse));
    }
  }
  if (a.tokens != nullptr) a.tokens[r] = token;
  if (a.logprobs != nullptr) a.logprobs[r] = logprob;
  if (a.raw_logprobs == nullptr && a.top_n == 0) return;

  if (has_dense(a) || has_sparse(a)) row.load<T>(a, r, true);
  const bool any = row.largest > kMinusInfinity;
  const float log_sum = any ? log_of_mass(row.mass(Cut{}, 1.0f)) : 0.0f;
  if (a.raw_logprobs != nullptr) {
    a.raw_logprobs[r] = any && token >= 0 ? row.value(token) - row.largest - log_sum : kMinusInfinity;
  }
  if (a.top_n == 0) return;
  tokens.clear();
  if (any) row.first_tokens(Cut{}, a.top_n, tokens);
  std::sort(tokens.begin(), tokens.end(), std::greater<uint64_t>());
  for (int64_t i = 0; i < a.top_n; ++i) {
    const bool there = i < static_cast<int64_t>(tokens.size());
    a.top_ids[r * a.top_n + i] = there ? static_cast<int64_t>(id_of(tokens[i])) : -1;
    a.top_logprobs[r * a.top_n + i] = there ? value_of(tokens[i]) - row.largest - log_sum : kMinusInfinity;
  }
}

template <class T>
void rows(const Sample& a, const Parallel& parallel) {
  parallel.run(a.rows, 1, [&](int64_t begin, int64_t end) {
    Row row;
    std::vector<uint64_t> tokens;
    for (int64_t r = begin; r < end; ++r) sample_row<T>(a, r, row, tokens);
  });
}

}  // namespace

void sample(const Sample& a, const Parallel& parallel) {
  switch (a.dtype) {
    case DType::kFloat32:
      return rows<float>(a, parallel);
    case DType::kFloat16:
      return rows<Float16>(a, parallel);
    default:
      return rows<BFloat16>(a, parallel);
  }
}

}  // namespace quartz::kernels::QUARTZ_ISA
