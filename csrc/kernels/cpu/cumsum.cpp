#include "kernels/cumsum.h"

#include <type_traits>

#include "kernels/cpu/rows.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

template <class T, class Y>
void rows(const CumSum& a, int64_t begin, int64_t end) {
  using Total = std::conditional_t<std::is_same_v<T, float>, double, float>;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    Y* y = static_cast<Y*>(a.y) + row * a.width;
    Total total = 0;
    for (int64_t k = 0; k < a.width; ++k) {
      total += to_float(x[k]);
      y[k] = from_float<Y>(static_cast<float>(total));
    }
  }
}

}  // namespace

void cumsum(const CumSum& a, const Parallel& parallel) {
  with_dtype(a.dtype, [&](auto x) {
    using T = decltype(x);
    parallel.run(a.rows, row_grain(a.width, 8192), [&](int64_t begin, int64_t end) {
      if (a.y_dtype == a.dtype) return rows<T, T>(a, begin, end);
      rows<T, float>(a, begin, end);
    });
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
