// The attention kernel through its C++ interface: what it reads, its bits on every instruction set, and a plain loop.
#include "kernels/attention.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

namespace quartz::kernels {
namespace {

// Memory that ends where the last element does: a read or write behind it ends the process.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {
    size_ = (bytes + page_ - 1) / page_ * page_ + page_;
    base_ = static_cast<char*>(mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + size_ - page_, page_, PROT_NONE);
    data_ = base_ + size_ - page_ - bytes;
  }
  Guarded(const Guarded&) = delete;
  ~Guarded() { munmap(base_, size_); }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  std::size_t page_, size_;
  char *base_, *data_;
};

template <class T>
void fill(T* data, int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) data[i] = from_float<T>(normal(random));
}

struct Shape {
  int64_t heads, kv_heads, queries, keys, size, value_size;
};

template <class T>
DType dtype_of() {
  return std::is_same_v<T, float> ? DType::kFloat32 : std::is_same_v<T, Float16> ? DType::kFloat16 : DType::kBFloat16;
}

template <class T>
void check(const Shape& s, bool masked) {
  Guarded q(s.heads * s.queries * s.size * sizeof(T)), k(s.kv_heads * s.keys * s.size * sizeof(T)),
      v(s.kv_heads * s.keys * s.value_size * sizeof(T)), mask(s.queries * s.keys * sizeof(T)),
      out(s.heads * s.queries * s.value_size * sizeof(T)), other(s.heads * s.queries * s.value_size * sizeof(T));
  fill(q.as<T>(), s.heads * s.queries * s.size, 1);
  fill(k.as<T>(), s.kv_heads * s.keys * s.size, 2);
  fill(v.as<T>(), s.kv_heads * s.keys * s.value_size, 3);
  fill(mask.as<T>(), s.queries * s.keys, 4);
  Attention a{};
  a.dtype = dtype_of<T>();
  a.batch = 1;
  a.heads = s.heads;
  a.kv_heads = s.kv_heads;
  a.queries = s.queries;
  a.keys = s.keys;
  a.head_size = s.size;
  a.value_size = s.value_size;
  a.q = q.as<T>();
  a.k = k.as<T>();
  a.v = v.as<T>();
  a.out = out.as<T>();
  a.q_strides = {0, s.queries * s.size, s.size};
  a.k_strides = {0, s.keys * s.size, s.size};
  a.v_strides = {0, s.keys * s.value_size, s.value_size};
  a.out_strides = {0, s.queries * s.value_size, s.value_size};
  a.scale = 1.0f / std::sqrt(static_cast<float>(s.size));
  a.causal = true;
  a.query_offset = s.keys - s.queries;
  if (masked) {
    a.mask = mask.as<T>();
    a.mask_kind = a.dtype == DType::kFloat32   ? MaskKind::kFloat32
                  : a.dtype == DType::kFloat16 ? MaskKind::kFloat16
                                               : MaskKind::kBFloat16;
    a.mask_strides[2] = s.keys;
    a.mask_strides[3] = 1;
  }
  cpu_avx2::attention(a, serial());
  Isa best;
  ASSERT_TRUE(detect_isa(&best));
  if (best != Isa::kAvx2) {
    a.out = other.as<T>();
    cpu_avx512::attention(a, serial());
    EXPECT_EQ(memcmp(out.as<T>(), other.as<T>(), s.heads * s.queries * s.value_size * sizeof(T)), 0);
  }

  const int64_t group = s.heads / s.kv_heads;
  double worst = 0;
  for (int64_t h = 0; h < s.heads; ++h) {
    for (int64_t i = 0; i < s.queries; ++i) {
      const int64_t seen = a.query_offset + i + 1;
      std::vector<double> p(seen), sum(s.value_size);
      double total = 0;
      for (int64_t j = 0; j < seen; ++j) {
        double score = 0;
        for (int64_t d = 0; d < s.size; ++d) {
          score += static_cast<double>(to_float(q.as<T>()[(h * s.queries + i) * s.size + d])) *
                   to_float(k.as<T>()[(h / group * s.keys + j) * s.size + d]);
        }
        score *= a.scale;
        if (masked) score += to_float(mask.as<T>()[i * s.keys + j]);
        total += p[j] = std::exp(score);
      }
      for (int64_t j = 0; j < seen; ++j) {
        for (int64_t d = 0; d < s.value_size; ++d) {
          sum[d] += p[j] / total * to_float(v.as<T>()[(h / group * s.keys + j) * s.value_size + d]);
        }
      }
      for (int64_t d = 0; d < s.value_size; ++d) {
        const double got = to_float(out.as<T>()[(h * s.queries + i) * s.value_size + d]);
        worst = std::max(worst, std::abs(got - sum[d]));
      }
    }
  }
  const double allowed = a.dtype == DType::kFloat32 ? 1e-5 : a.dtype == DType::kFloat16 ? 2e-3 : 1.6e-2;
  EXPECT_LT(worst, allowed);
}

TEST(Attention, ReadsNothingBehindItsArguments) {
  for (const Shape& shape : {Shape{1, 1, 1, 1, 1, 1},
                             {6, 2, 1, 37, 40, 24},
                             {3, 1, 5, 70, 17, 33},
                             {4, 4, 50, 65, 64, 64},
                             {8, 1, 2, 129, 80, 5},
                             {2, 1, 1, 300, 128, 128}}) {
    for (const bool masked : {false, true}) {
      check<float>(shape, masked);
      check<Float16>(shape, masked);
      check<BFloat16>(shape, masked);
    }
  }
}

}  // namespace
}  // namespace quartz::kernels
