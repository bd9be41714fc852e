#include "kernels/multinomial.h"

#include <algorithm>
#include <atomic>

#include "kernels/scratch.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

struct Row {
  double largest = 0.0;
  int64_t candidates = 0;  // categories with a probability
  int32_t flags = 0;
};

template <class T>
Row look_at(const Multinomial& a, const T* p) {
  Row row;
  for (int64_t j = 0; j < a.categories; ++j) {
    const double value = probability_of(p[j]);
    const bool valid = is_probability(value);
    if (!valid) row.flags |= kBadProbability;
    row.largest = valid && value > row.largest ? value : row.largest;
    row.candidates += valid && value > 0.0;
  }
  if (row.candidates == 0) row.flags |= kNoProbability;
  if (!a.replacement && row.candidates > 0 && row.candidates < a.samples) row.flags |= kTooFewCategories;
  return row;
}

// Calls visit(j, key) for every category.
template <class T, class Visit>
void race(const Multinomial& a, const T* p, int64_t number, const Row& row, const Visit& visit) {
  constexpr int kGroup = 16;  // blocks at a time: loops that the compiler turns into vectors
  const WeightScale scale(row.candidates > 0 ? row.largest : 1.0);
  const int64_t blocks = (a.categories + 3) / 4, base = number * blocks;
  for (int64_t block = 0; block < blocks; block += kGroup) {
    PhiloxWords words[kGroup];
    float exponential[4 * kGroup];
    for (int i = 0; i < kGroup; ++i) words[i] = a.source.block(base + block + i);
    for (int i = 0; i < kGroup; ++i) {
      for (int j = 0; j < 4; ++j) exponential[4 * i + j] = race_exponential(words[i].word[j]);
    }
    const int64_t first = 4 * block, count = std::min<int64_t>(4 * kGroup, a.categories - first);
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t word = words[i / 4].word[i % 4];
      if (needs_tail(word)) {
        const PhiloxWords tail = a.source.block(base + block + i / 4, NoiseStream::kRaces);
        exponential[i] = race_exponential(word, tail.word[i % 4]);
      }
      const double value = probability_of(p[first + i]);
      const bool candidate = is_probability(value) && value > 0.0;
      const float score = candidate ? race_score(scale.weight(value), exponential[i]) : kNoScore;
      visit(first + i, race_key(score, first + i));
    }
  }
}

template <class T>
void without_replacement(const Multinomial& a, const T* p, int64_t number, const Row& row, int64_t* result) {
  if (a.samples == 1) {
    uint64_t best = ~uint64_t{0};
    race(a, p, number, row, [&](int64_t, uint64_t key) { best = std::min(best, key); });
    result[0] = static_cast<int64_t>(best & 0xffffffffu);
    return;
  }
  const Scratch scratch(Scratch::kRows, a.categories * static_cast<int64_t>(sizeof(uint64_t)));
  auto* keys = reinterpret_cast<uint64_t*>(scratch.floats());
  race(a, p, number, row, [&](int64_t j, uint64_t key) { keys[j] = key; });
  if (a.samples < a.categories) std::nth_element(keys, keys + a.samples, keys + a.categories);
  std::sort(keys, keys + a.samples);
  for (int64_t k = 0; k < a.samples; ++k) result[k] = static_cast<int64_t>(keys[k] & 0xffffffffu);
}

template <class T>
void with_replacement(const Multinomial& a, const T* p, int64_t number, const Row& row, int64_t* result) {
  const Scratch scratch(Scratch::kRows, a.categories * static_cast<int64_t>(sizeof(uint64_t)));
  auto* prefix = reinterpret_cast<uint64_t*>(scratch.floats());
  const WeightScale scale(row.candidates > 0 ? row.largest : 1.0);
  uint64_t sum = 0;
  for (int64_t j = 0; j < a.categories; ++j) {
    sum += multinomial_mass(scale.weight(probability_of(p[j])));
    prefix[j] = sum;
  }
  const int64_t base = number * ((a.samples + 1) / 2);
  PhiloxWords words{};
  for (int64_t k = 0; k < a.samples; ++k) {
    if (k % 2 == 0) words = a.source.block(base + k / 2);
    result[k] = sum == 0 ? 0 : multinomial_find(prefix, a.categories, multinomial_target(words, k, sum));
  }
}

template <class T>
void rows(const Multinomial& a, int64_t begin, int64_t end) {
  for (int64_t number = begin; number < end; ++number) {
    const T* p = static_cast<const T*>(a.probabilities) + number * a.categories;
    int64_t* result = a.result + number * a.samples;
    const Row row = look_at(a, p);
    if (row.flags != 0) std::atomic_ref<int32_t>(*a.flags).fetch_or(row.flags, std::memory_order_relaxed);
    if (a.replacement) {
      with_replacement(a, p, number, row, result);
    } else {
      without_replacement(a, p, number, row, result);
    }
  }
}

}  // namespace

void multinomial(const Multinomial& a, const Parallel& parallel) {
  const int64_t grain = std::max<int64_t>(1, 4096 / a.categories);
  parallel.run(a.rows, grain, [&](int64_t begin, int64_t end) {
    with_random_type(a.type, [&](auto element) {
      if constexpr (sizeof(element) > 1) rows<decltype(element)>(a, begin, end);
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
