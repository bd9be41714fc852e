#include <climits>

#include "kernels/cuda/matmul_kernels.h"

namespace quartz::kernels::cuda {

bool can_copy(const void* data, int64_t batch, int64_t rows, int64_t k, int64_t batch_stride, int64_t row,
              int64_t column, bool& k_major) {
  constexpr int64_t kElements = 8, kMostBytes = int64_t{1} << 40;  // 16 bytes; the largest stride
  const auto multiple = [](int64_t stride) { return stride > 0 && stride % kElements == 0 && 2 * stride < kMostBytes; };
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return false;
  if (batch > 1 && batch_stride != 0 && !multiple(batch_stride)) return false;
  k_major = (column == 1 || k == 1) && multiple(row);
  return k_major || ((row == 1 || rows == 1) && multiple(column));
}

bool matmul(const Matmul& given) {
  Matmul a = given;
  if (a.out_dtype != a.dtype && a.out_dtype != DType::kFloat32) return false;
  if (a.bias != nullptr && a.bias_dtype != a.dtype && a.bias_dtype != DType::kFloat32) return false;
  constexpr int64_t kMost = INT_MAX - 1024;
  if (a.m > kMost || a.n > kMost || a.k > kMost || a.batch > kMost) return false;
  if (a.m == 0 || a.n == 0 || a.batch == 0) return true;
  if (a.dtype == DType::kFloat32) {
    matmul_float(a);
    return true;
  }

  // The stride of a dimension of one element says nothing; the copy engine wants a valid one all the same.
  const int64_t any = (a.k + 7) / 8 * 8;
  if (a.m == 1) a.x_row = any;
  if (a.n == 1) a.w_row = any;
  Layout layout{};
  layout.aligned = a.k > 0 && can_copy(a.x, a.batch, a.m, a.k, a.x_batch, a.x_row, a.x_k, layout.x_k_major) &&
                   can_copy(a.w, a.batch, a.n, a.k, a.w_batch, a.w_row, a.w_k, layout.w_k_major);
  if (!layout.aligned) {
    matmul_general(a);
    return true;
  }
  const bool k_major = layout.x_k_major && layout.w_k_major;
  // Where clusters win over the tiles of prefill: up to 128 rows, or 256 of few columns.
  const bool few_columns = a.n <= 2112 && a.m <= 256,
             middle = (a.n <= 4224 || (a.n > 5280 && a.n <= 6336)) && a.m <= 128;
  if (k_major && a.m <= 64)
    matmul_decode(a);
  else if (k_major && a.activation == Activation::kNone && a.batch == 1 && (few_columns || middle))
    matmul_cluster(a);
  else if (k_major && a.activation == Activation::kNone)
    matmul_prefill(a);
  else
    matmul_prefill_mixed(a, layout);
  return true;
}

}  // namespace quartz::kernels::cuda
