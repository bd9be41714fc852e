// What the kernels of the matrix product share: their parameters, and what happens to a sum before it is stored.
#pragma once

#include <algorithm>

#include "kernels/cuda/hopper.cuh"
#include "kernels/elementary.h"
#include "kernels/matmul_cuda.h"

namespace quartz::kernels::cuda {

// What a kernel gets besides its tensor maps.
struct Product {
  void* out;
  const void* bias;
  int64_t out_batch, out_row, bias_batch, bias_row;
  int m, n, batch;
  int k_blocks;              // of 64; the last may be partial
  int x_batched, w_batched;  // 0: one matrix for every batch
  float alpha, beta;
  Activation activation;
  bool out_float, bias_float;
  bool pairs;         // two neighbours of a row can be stored at once
  bool copy_stores;   // the copy engine can store whole tiles
  bool whole_blocks;  // k is a multiple of 64
  bool frozen_weights;
};

inline Product product_of(const Matmul& a) {
  const auto out_bytes = size_of(a.out_dtype);
  const auto address = reinterpret_cast<uintptr_t>(a.out);
  Product p{};
  p.out = a.out;
  p.bias = a.bias;
  p.out_batch = a.out_batch;
  p.out_row = a.out_row;
  p.bias_batch = a.bias_batch;
  p.bias_row = a.bias_row;
  p.m = static_cast<int>(a.m);
  p.n = static_cast<int>(a.n);
  p.batch = static_cast<int>(a.batch);
  p.k_blocks = static_cast<int>((a.k + 63) / 64);
  p.x_batched = a.batch > 1 && a.x_batch != 0;
  p.w_batched = a.batch > 1 && a.w_batch != 0;
  p.alpha = a.alpha;
  p.beta = a.beta;
  p.activation = a.activation;
  p.out_float = a.out_dtype == DType::kFloat32;
  p.bias_float = a.bias_dtype == DType::kFloat32;
  const bool one_batch = a.batch == 1;
  p.pairs = address % (2 * out_bytes) == 0 && a.out_row % 2 == 0 && (one_batch || a.out_batch % 2 == 0);
  const int64_t unit = 16 / out_bytes;
  p.copy_stores = address % 16 == 0 && a.out_row % unit == 0 && (one_batch || a.out_batch % unit == 0);
  p.whole_blocks = a.k % 64 == 0;
  p.frozen_weights = a.frozen_weights;
  return p;
}

QUARTZ_DEVICE float sigmoid_product(float v, float u) { return v / (1.0f + exp_f32(-u)); }
QUARTZ_DEVICE float activate(Activation activation, float v) {
  switch (activation) {
    case Activation::kRelu:
      return v < 0.0f ? 0.0f : v;  // NaN stays
    case Activation::kSilu:
      return sigmoid_product(v, v);
    case Activation::kGeluTanh:
      return sigmoid_product(v, 0x1.988454p+0f * (v + 0.044715f * (v * v * v)));
    case Activation::kGeluQuick:
      return sigmoid_product(v, 1.702f * v);
    default:
      return v;
  }
}

// The rest of one row of the output. `T` is the type of x and w.
template <class T, bool kActivate>
class Row {
 public:
  QUARTZ_DEVICE Row(const Product& p, int64_t batch, int64_t row)
      : p_(p), out_(batch * p.out_batch + row * p.out_row), bias_(batch * p.bias_batch + row * p.bias_row) {}

  QUARTZ_DEVICE float finish(int64_t column, float sum) const {
    // A zero is +0: whether the chain was continued over zeros beyond k must not show.
    float v = __fmul_rn(p_.alpha, __fadd_rn(sum, 0.0f));
    if (p_.bias != nullptr) {
      const float bias = p_.bias_float ? static_cast<const float*>(p_.bias)[bias_ + column]
                                       : to_float(static_cast<const T*>(p_.bias)[bias_ + column]);
      v = __fadd_rn(v, __fmul_rn(p_.beta, bias));
    }
    if constexpr (kActivate) v = activate(p_.activation, v);
    return v;
  }
  QUARTZ_DEVICE void put(int64_t column, float sum) const {
    if (column >= p_.n) return;
    const float v = finish(column, sum);
    if (p_.out_float) {
      static_cast<float*>(p_.out)[out_ + column] = v;
    } else {
      const auto bits = static_cast<uint16_t>(pack<T>(v, v));
      static_cast<uint16_t*>(p_.out)[out_ + column] = bits;
    }
  }
  // Two neighbours, `column` even.
  QUARTZ_DEVICE void put_pair(int64_t column, float first, float second) const {
    if (!p_.pairs || column + 1 >= p_.n) {
      put(column, first);
      put(column + 1, second);
      return;
    }
    const float a = finish(column, first), b = finish(column + 1, second);
    if (p_.out_float)
      *reinterpret_cast<float2*>(static_cast<float*>(p_.out) + out_ + column) = make_float2(a, b);
    else
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p_.out) + out_ + column) = pack<T>(a, b);
  }

 private:
  const Product& p_;
  int64_t out_, bias_;
};

}  // namespace quartz::kernels::cuda
