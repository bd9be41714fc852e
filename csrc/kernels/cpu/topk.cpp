#include "kernels/topk.h"

#include <algorithm>
#include <vector>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

// For a small k: a heap of the k best so far, its worst on top. Elements come by ascending index, so one that is not
// strictly better than the worst has no place.
template <class T>
void select_few(const TopK& a, const T* x, std::vector<uint64_t>& keys) {
  keys.clear();
  for (int64_t i = 0; i < a.k; ++i) keys.push_back(topk_key(to_float(x[i]), i, a.largest));
  std::make_heap(keys.begin(), keys.end());
  const auto offer = [&](int64_t i) {
    const uint64_t key = topk_key(to_float(x[i]), i, a.largest);
    if (key >= keys.front()) return;
    std::pop_heap(keys.begin(), keys.end());
    keys.back() = key;
    std::push_heap(keys.begin(), keys.end());
  };
  int64_t i = a.k;
  for (; i + 16 <= a.width; i += 16) {
    const Vec16 value = load16(x + i), worst = broadcast16(to_float(x[keys.front() & 0xffffffffu]));
    const bool better = a.largest ? any_less(worst, value) : any_less(value, worst);
    if (!better && !any_nan(value) && !any_nan(worst)) continue;
    for (int64_t j = 0; j < 16; ++j) offer(i + j);
  }
  for (; i < a.width; ++i) offer(i);
  std::sort_heap(keys.begin(), keys.end());
}

template <class T>
void select_many(const TopK& a, const T* x, std::vector<uint64_t>& keys) {
  keys.resize(static_cast<size_t>(a.width));
  for (int64_t i = 0; i < a.width; ++i) keys[static_cast<size_t>(i)] = topk_key(to_float(x[i]), i, a.largest);
  const auto middle = keys.begin() + a.k;
  if (a.k < a.width) std::nth_element(keys.begin(), middle - 1, keys.end());
  std::sort(keys.begin(), middle);
}

template <class T>
void rows(const TopK& a, int64_t begin, int64_t end) {
  std::vector<uint64_t> keys;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    if (a.k <= 16 || a.k <= a.width / 64) {
      select_few(a, x, keys);
    } else {
      select_many(a, x, keys);
    }
    for (int64_t i = 0; i < a.k; ++i) {
      const auto index = static_cast<int64_t>(keys[static_cast<size_t>(i)] & 0xffffffffu);
      static_cast<T*>(a.values)[row * a.k + i] = x[index];
      a.indices[row * a.k + i] = index;
    }
  }
}

}  // namespace

void topk(const TopK& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    parallel.run(a.rows, row_grain(a.width, 4096),
                 [&](int64_t begin, int64_t end) { rows<decltype(x)>(a, begin, end); });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
