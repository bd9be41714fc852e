#include "kernels/cuda/matmul_decode.cuh"

#include "kernels/cuda/matmul_kernels.h"

namespace quartz::kernels::cuda {
namespace {

// At most kX rows; the width that gives at most one tile to a multiprocessor, for the largest widths several.
template <class T, int kX>
void narrow(const Matmul& a) {
  const int64_t blocks = multiprocessors();
  const auto fits = [&](int width) { return (a.n + width - 1) / width * a.batch <= blocks; };
  constexpr bool kHalf = kX <= 32;
  if (fits(16)) return run_decode<DecodeTile<T, false, 16, kX, kHalf ? 9 : 5, 4>>(a);
  if (fits(32)) return run_decode<DecodeTile<T, false, 32, kX, kHalf ? 6 : 4, 4>>(a);
  if (kHalf && fits(40)) return run_decode<DecodeTile<T, false, 40, kX, kHalf ? 6 : 4, 4>>(a);
  if (fits(48)) return run_decode<DecodeTile<T, false, 48, kX, kHalf ? 5 : 7, kHalf ? 4 : 2>>(a);
  run_decode<DecodeTile<T, false, 96, kX, kHalf ? 6 : 5, 2>>(a);
}

template <class T>
void decode(const Matmul& a) {
  if (a.m <= 8) {
    // Few columns, as of a router: narrow tiles, or most multiprocessors would have nothing to read.
    if (a.activation == Activation::kNone && a.n * a.batch <= 256)
      return run_decode<DecodeTile<T, false, 8, 8, 9, 8>>(a);
    if (a.activation == Activation::kNone && a.n * a.batch > 8448)
      return run_decode<DecodeTile<T, false, 192, 8, 8, 1>>(a);
    return run_decode<DecodeTile<T, true, 64, 8, 6, 4>>(a);
  }
  if (a.m <= 16) return run_decode<DecodeTile<T, true, 64, 16, 5, 4>>(a);
  if (a.activation != Activation::kNone) return run_decode<DecodeTile<T, false, 64, 64, 6, 2, true>>(a);
  if (a.m <= 32) return narrow<T, 32>(a);
  narrow<T, 64>(a);
}

}  // namespace

void matmul_decode(const Matmul& a) {
  if (a.dtype == DType::kBFloat16) return decode<BFloat16>(a);
  decode<Float16>(a);
}

}  // namespace quartz::kernels::cuda
