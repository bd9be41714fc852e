// The product kernels of CUDA through their C++ interface: values against float64, and the bits of a row whatever the
// number of rows, its place, its neighbours, the layout of the operands and the way of launching.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda_buffer.h"
#include "kernels/matmul_cuda.h"

namespace quartz::kernels {
namespace {

using cuda::Activation;
using cuda::Matmul;

// Device memory of 16-bit or 32-bit elements, copied from and to the host.
template <class T>
class Device {
 public:
  explicit Device(std::size_t count) : count_(count) {
    EXPECT_EQ(cudaMalloc(&data_, count * sizeof(T) + 16), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0x55, count * sizeof(T) + 16), cudaSuccess);
  }
  explicit Device(const std::vector<T>& values) : Device(values.size()) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~Device() { cudaFree(data_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  std::vector<T> host() const {
    std::vector<T> values(count_);
    EXPECT_EQ(cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t count_;
};

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> {
  static constexpr DType kType = DType::kFloat32;
  static uint32_t bits(float v) { return bits_of_float(v); }
};
template <>
struct TypeOf<BFloat16> {
  static constexpr DType kType = DType::kBFloat16;
  static uint32_t bits(BFloat16 v) { return v.bits; }
};
template <>
struct TypeOf<Float16> {
  static constexpr DType kType = DType::kFloat16;
  static uint32_t bits(Float16 v) { return v.bits; }
};

template <class T>
std::vector<T> normal(std::size_t count, float scale, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw(0.0f, scale);
  std::vector<T> values(count);
  for (T& value : values) value = from_float<T>(draw(engine));
  return values;
}

template <class T>
std::vector<T> transposed(const std::vector<T>& values, int64_t rows, int64_t columns) {
  std::vector<T> result(values.size());
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) result[c * rows + r] = values[r * columns + c];
  return result;
}

template <class T>
class MatmulCuda : public CudaTest {
 protected:
  static Matmul contiguous(const T* x, const T* w, T* out, int64_t m, int64_t n, int64_t k) {
    Matmul a{};
    a.x = x;
    a.w = w;
    a.out = out;
    a.batch = 1;
    a.m = m;
    a.n = n;
    a.k = k;
    a.x_row = a.w_row = k;
    a.x_k = a.w_k = 1;
    a.out_row = n;
    a.dtype = a.out_dtype = a.bias_dtype = TypeOf<T>::kType;
    return a;
  }
  static std::vector<T> run(Matmul a) {
    Device<T> out(static_cast<std::size_t>(a.m * a.n));
    a.out = out.data();
    EXPECT_TRUE(cuda::matmul(a));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out.host();
  }
  // Rows of `got` against rows of `all` from `first` on, in every bit.
  static ::testing::AssertionResult same_rows(const std::vector<T>& got, const std::vector<T>& all, int64_t first,
                                              int64_t n) {
    for (std::size_t i = 0; i < got.size(); ++i)
      if (TypeOf<T>::bits(got[i]) != TypeOf<T>::bits(all[first * n + i]))
        return ::testing::AssertionFailure() << "row " << i / n << ", column " << i % n;
    return ::testing::AssertionSuccess();
  }
};
using Types = ::testing::Types<BFloat16, Float16, float>;
TYPED_TEST_SUITE(MatmulCuda, Types);

struct Size {
  int64_t n, k;
};
constexpr Size kSizes[] = {{136, 192}, {264, 200}, {77, 45}, {512, 320}, {1, 8}, {2048, 64}};
constexpr int64_t kRows = 300;

TYPED_TEST(MatmulCuda, IsCloseToFloat64) {
  using T = TypeParam;
  for (const auto [n, k] : kSizes) {
    const auto x = normal<T>(kRows * k, 1.0f, 1), w = normal<T>(n * k, 0.1f, 2);
    const Device<T> dx(x), dw(w);
    const auto got = this->run(this->contiguous(dx.data(), dw.data(), nullptr, kRows, n, k));
    double error = 0, size = 0;
    for (int64_t m = 0; m < kRows; m += 37)
      for (int64_t c = 0; c < n; ++c) {
        double sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += static_cast<double>(to_float(x[m * k + i])) * to_float(w[c * k + i]);
        error += std::pow(to_float(got[m * n + c]) - sum, 2);
        size += sum * sum;
      }
    const double most = sizeof(T) == 4 ? 1e-6 : std::is_same_v<T, BFloat16> ? 2.5e-3 : 4e-4;
    EXPECT_LT(std::sqrt(error / size), most) << n << " x " << k;
  }
}

TYPED_TEST(MatmulCuda, ARowIsTheSameWhateverIsAroundIt) {
  using T = TypeParam;
  for (const auto [n, k] : kSizes) {
    auto x = normal<T>(kRows * k, 1.0f, 3);
    for (int64_t i = 0; i < k; ++i) {
      x[5 * k + i] = from_float<T>(std::numeric_limits<float>::quiet_NaN());
      x[6 * k + i] = from_float<T>(-0.0f);
      x[7 * k + i] = from_float<T>(i == 1 ? std::numeric_limits<float>::infinity() : 1.0f);
    }
    const auto w = normal<T>(n * k, 0.1f, 4);
    const Device<T> dx(x), dw(w), dwt(transposed(w, n, k));
    const auto all = this->run(this->contiguous(dx.data(), dw.data(), nullptr, kRows, n, k));
    for (const int64_t m : {1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 200, 257})
      for (const int64_t first : {0, 1, 5, 43})
        for (const bool frozen : {false, true}) {
          auto a = this->contiguous(dx.data() + first * k, dw.data(), nullptr, m, n, k);
          a.frozen_weights = frozen;
          EXPECT_TRUE(this->same_rows(this->run(a), all, first, n))
              << m << " from " << first << ", " << n << " x " << k;
          a.w = dwt.data();
          a.w_row = 1;
          a.w_k = n;
          EXPECT_TRUE(this->same_rows(this->run(a), all, first, n)) << "w as [k, n], " << m << ", " << n << " x " << k;
        }
  }
}

TYPED_TEST(MatmulCuda, ZeroSizesAndAnEmptySum) {
  using T = TypeParam;
  const Device<T> x(64), w(64);
  EXPECT_TRUE(cuda::matmul(this->contiguous(x.data(), w.data(), nullptr, 0, 8, 8)));
  EXPECT_TRUE(cuda::matmul(this->contiguous(x.data(), w.data(), nullptr, 8, 0, 8)));
  for (const T value : this->run(this->contiguous(x.data(), w.data(), nullptr, 4, 8, 0)))
    EXPECT_EQ(TypeOf<T>::bits(value), 0u);
}

TYPED_TEST(MatmulCuda, BiasAndActivationComeBeforeTheRounding) {
  using T = TypeParam;
  constexpr int64_t n = 136, k = 192;
  const auto bias = normal<T>(kRows * n, 1.0f, 7);
  const Device<T> x(normal<T>(kRows * k, 1.0f, 5)), w(normal<T>(n * k, 0.1f, 6)), dbias(bias);
  for (const int64_t m : {3, 12, 30, 64, 100, 300}) {
    auto a = this->contiguous(x.data(), w.data(), nullptr, m, n, k);
    Device<float> sums(m * n);
    a.out = sums.data();
    a.out_dtype = DType::kFloat32;
    ASSERT_TRUE(cuda::matmul(a));
    const auto sum = sums.host();
    a.out_dtype = a.dtype;
    a.bias = dbias.data();
    a.bias_row = n;
    a.alpha = 0.37f;
    a.beta = -1.7f;
    a.activation = Activation::kRelu;
    std::vector<T> expected(m * n);
    for (int64_t i = 0; i < m * n; ++i) {
      const float scaled = 0.37f * sum[i], added = -1.7f * to_float(bias[i]);
      const float v = scaled + added;
      expected[i] = from_float<T>(v < 0.0f ? 0.0f : v);
    }
    EXPECT_TRUE(this->same_rows(this->run(a), expected, 0, n)) << m;
  }
}

}  // namespace
}  // namespace quartz::kernels
