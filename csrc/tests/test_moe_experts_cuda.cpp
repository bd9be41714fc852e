// The experts layer of CUDA through its C++ interface: values against float64, and a token's bits whatever the number
// of tokens and its place; ids of no expert, the same expert twice, tokens without any.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda_buffer.h"
#include "kernels/moe_cuda.h"

namespace quartz::kernels {
namespace {

using cuda::MoeExperts;

std::vector<BFloat16> normal(std::size_t count, float scale, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw(0.0f, scale);
  std::vector<BFloat16> values(count);
  for (BFloat16& value : values) value = from_float<BFloat16>(draw(engine));
  return values;
}

constexpr int64_t kExperts = 12, kHidden = 128, kWidth = 192, kK = 4, kTokens = 500;

struct Layer {
  bool transposed;  // as gpt-oss: also alternating gates, biases, limits
  std::vector<BFloat16> x = normal(kTokens * kHidden, 1.0f, 1), up = normal(kExperts * 2 * kWidth * kHidden, 0.1f, 2),
                        down = normal(kExperts * kWidth * kHidden, 0.1f, 3),
                        up_bias = normal(kExperts * 2 * kWidth, 0.5f, 4),
                        down_bias = normal(kExperts * kHidden, 0.5f, 5);
  std::vector<int64_t> ids;
  std::vector<float> weights;
  Buffer dx{x}, dup{up}, ddown{down}, dup_bias{up_bias}, ddown_bias{down_bias};

  explicit Layer(bool as_gpt_oss) : transposed(as_gpt_oss), ids(kTokens * kK), weights(kTokens * kK) {
    std::mt19937 engine(7);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto t = static_cast<int64_t>(i) / kK, slot = static_cast<int64_t>(i) % kK;
      ids[i] = static_cast<int64_t>(engine() % kExperts);
      if (t % 7 == 2) ids[i] = slot % 2 == 0 ? -1 : kExperts;  // no expert at all
      if (t % 5 == 1 && slot == 2) ids[i] = -5;
      if (t % 5 == 4 && slot > 0) ids[i] = ids[i - 1];  // one expert in every slot
      weights[i] = static_cast<float>(engine() % 1000) * 1e-3f;
    }
  }

  std::vector<BFloat16> run(int64_t first, int64_t tokens, bool frozen) const {
    const std::vector<int64_t> some(ids.begin() + first * kK, ids.begin() + (first + tokens) * kK);
    const Buffer dids(some), y(static_cast<std::size_t>(tokens * kHidden * 2));
    const Buffer dweights(std::vector<float>(weights.begin() + first * kK, weights.begin() + (first + tokens) * kK));
    MoeExperts a{};
    a.x = static_cast<const BFloat16*>(dx.data()) + first * kHidden;
    a.ids = static_cast<const int64_t*>(dids.data());
    a.weights = static_cast<const float*>(dweights.data());
    a.up = dup.data();
    a.down = ddown.data();
    a.up_bias = transposed ? dup_bias.data() : nullptr;
    a.down_bias = transposed ? ddown_bias.data() : nullptr;
    a.y = y.data();
    a.tokens = tokens;
    a.hidden = a.x_row = kHidden;
    a.width = kWidth;
    a.experts = kExperts;
    a.k = kK;
    a.interleaved = a.transposed = transposed;
    a.activation = GateActivation::kSilu;
    a.alpha = transposed ? 1.702f : 1.0f;
    a.limit = transposed ? 7.0f : std::numeric_limits<float>::infinity();
    a.up_offset = transposed ? 1.0f : 0.0f;
    a.dtype = DType::kBFloat16;
    a.frozen_weights = frozen;
    const int64_t bytes = cuda::moe_experts_workspace(a);
    EXPECT_GT(bytes, 0);
    const Buffer workspace(static_cast<std::size_t>(bytes));
    a.workspace = workspace.data();
    cuda::moe_experts(a);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return y.host<BFloat16>();
  }

  std::vector<double> expected(int64_t token) const {
    std::vector<double> y(kHidden, 0.0), h(kWidth);
    const auto at = [](const std::vector<BFloat16>& v, int64_t i) { return static_cast<double>(to_float(v[i])); };
    for (int64_t slot = 0; slot < kK; ++slot) {
      const int64_t e = ids[token * kK + slot];
      if (e < 0 || e >= kExperts) continue;
      for (int64_t i = 0; i < kWidth; ++i) {
        double sums[2] = {};
        for (int64_t u = 0; u < 2; ++u) {
          const int64_t column = transposed ? 2 * i + u : i + u * kWidth;
          for (int64_t c = 0; c < kHidden; ++c)
            sums[u] += at(x, token * kHidden + c) * at(up, transposed ? (e * kHidden + c) * 2 * kWidth + column
                                                                      : (e * 2 * kWidth + column) * kHidden + c);
          if (transposed) sums[u] += at(up_bias, e * 2 * kWidth + column);
        }
        double gate = sums[0], value = sums[1], alpha = 1.0;
        if (transposed) {
          gate = std::fmin(gate, 7.0);
          value = std::fmax(std::fmin(value, 7.0), -7.0) + 1.0;
          alpha = 1.702f;
        }
        h[i] = gate / (1.0 + std::exp(-alpha * gate)) * value;
      }
      for (int64_t c = 0; c < kHidden; ++c) {
        double o = transposed ? at(down_bias, e * kHidden + c) : 0.0;
        for (int64_t i = 0; i < kWidth; ++i)
          o += h[i] * at(down, transposed ? (e * kWidth + i) * kHidden + c : (e * kHidden + c) * kWidth + i);
        y[c] += weights[token * kK + slot] * o;
      }
    }
    return y;
  }
};

class MoeExpertsCuda : public CudaTest, public ::testing::WithParamInterface<bool> {};
INSTANTIATE_TEST_SUITE_P(AsGptOss, MoeExpertsCuda, ::testing::Bool());

TEST_P(MoeExpertsCuda, IsCloseToFloat64) {
  const Layer layer(GetParam());
  const auto y = layer.run(0, kTokens, false);
  double error = 0, size = 0;
  for (int64_t t = 0; t < kTokens; t += 3) {
    const auto expected = layer.expected(t);
    for (int64_t c = 0; c < kHidden; ++c) {
      error += std::pow(to_float(y[t * kHidden + c]) - expected[c], 2);
      size += expected[c] * expected[c];
    }
  }
  EXPECT_LT(std::sqrt(error / size), 6e-3);
}

TEST_P(MoeExpertsCuda, ATokenIsTheSameWhateverIsAroundIt) {
  const Layer layer(GetParam());
  const auto all = layer.run(0, kTokens, false);
  for (const int64_t tokens : {1, 2, 7, 8, 9, 33, 64, 65, 90, 130, 400})
    for (const int64_t first : {0, 1, 37})
      for (const bool frozen : {false, true}) {
        const auto some = layer.run(first, tokens, frozen);
        for (std::size_t i = 0; i < some.size(); ++i)
          ASSERT_EQ(some[i].bits, all[first * kHidden + i].bits)
              << tokens << " tokens from " << first << ", element " << i;
      }
}

TEST_P(MoeExpertsCuda, ATokenWithoutExpertsGetsZeros) {
  const Layer layer(GetParam());
  for (const BFloat16 value : layer.run(2, 1, false)) EXPECT_EQ(value.bits, 0);
}

}  // namespace
}  // namespace quartz::kernels
