// Products with quantised weights on CUDA through their C++ interface: decoded weights against the host's, bits against
// the plain product with the decoded weight, whatever the number of rows; experts against those with plain weights.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cuda_buffer.h"
#include "kernels/quantized_cuda.h"

namespace quartz::kernels {
namespace {

std::mt19937 engine(1);

std::vector<BFloat16> normal(int64_t count, float scale) {
  std::normal_distribution<float> draw(0.0f, scale);
  std::vector<BFloat16> values(static_cast<std::size_t>(count));
  for (BFloat16& value : values) value = from_float<BFloat16>(draw(engine));
  return values;
}
std::vector<uint8_t> bytes_between(int64_t count, int first, int last) {
  std::uniform_int_distribution<int> draw(first, last);
  std::vector<uint8_t> values(static_cast<std::size_t>(count));
  for (uint8_t& value : values) value = static_cast<uint8_t>(draw(engine));
  return values;
}
std::vector<float> floats_between(int64_t count, float first, float last) {
  std::uniform_real_distribution<float> draw(first, last);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = draw(engine);
  return values;
}

// A stack of random weights: on the GPU, and the same description of the host's copy.
struct Weight {
  Weight(WeightFormat format, bool blocks, bool outer, int64_t batch, int64_t n, int64_t k)
      : codes(bytes_between(batch * n * (format == WeightFormat::kFp8 ? k : k / 2), 0,
                            format == WeightFormat::kFp8 ? 0x50 : 255)),
        scales(bytes_between(batch * n * ((k + 15) / 16), format == WeightFormat::kNvFp4 ? 8 : 118,
                             format == WeightFormat::kNvFp4 ? 0x50 : 124)),
        block_scales(floats_between(batch * ((n + 127) / 128) * ((k + 127) / 128), 0.01f, 0.02f)),
        outer_scales(floats_between(batch * n, 0.01f, 0.02f)),
        gpu_codes(codes),
        gpu_scales(scales),
        gpu_blocks(block_scales),
        gpu_outer(outer_scales) {
    host.format = format;
    host.codes = codes.data();
    host.codes_row = format == WeightFormat::kFp8 ? k : k / 2;
    host.codes_batch = n * host.codes_row;
    gpu = host;
    if (format != WeightFormat::kFp8) {
      host.block_columns = format == WeightFormat::kNvFp4 ? 16 : 32;
      host.scales_row = (k + host.block_columns - 1) / host.block_columns;
      host.scales_batch = n * host.scales_row;
      host.scales = scales.data();
    } else if (blocks) {
      host.block_rows = host.block_columns = 128;
      host.scales_row = (k + 127) / 128;
      host.scales_batch = (n + 127) / 128 * host.scales_row;
      host.scales = block_scales.data();
    }
    gpu = host;
    gpu.codes = static_cast<const uint8_t*>(gpu_codes.data());
    if (host.scales != nullptr) gpu.scales = format == WeightFormat::kFp8 ? gpu_blocks.data() : gpu_scales.data();
    if (outer) {
      gpu.outer = gpu_outer.floats();
      gpu.outer_row = 1;
      gpu.outer_batch = n;
    }
  }
  std::vector<uint8_t> codes, scales;
  std::vector<float> block_scales, outer_scales;
  Buffer gpu_codes, gpu_scales, gpu_blocks, gpu_outer;
  QuantizedWeight host, gpu;
};

bool same(const std::vector<BFloat16>& a, const std::vector<BFloat16>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * 2) == 0;
}

struct Kind {
  WeightFormat format;
  bool blocks, outer;
};
const Kind kKinds[] = {{WeightFormat::kFp8, false, false},  {WeightFormat::kFp8, false, true},
                       {WeightFormat::kFp8, true, false},   {WeightFormat::kNvFp4, false, false},
                       {WeightFormat::kNvFp4, false, true}, {WeightFormat::kMxFp4, false, false}};

cuda::Matmul plain(const Buffer& x, const Buffer& w, const Buffer& out, int64_t m, int64_t n, int64_t k) {
  cuda::Matmul a{};
  a.x = x.data();
  a.w = w.data();
  a.out = out.data();
  a.batch = 1;
  a.m = m;
  a.n = n;
  a.k = a.x_row = a.w_row = k;
  a.x_k = a.w_k = 1;
  a.out_row = n;
  a.dtype = a.out_dtype = a.bias_dtype = DType::kBFloat16;
  return a;
}

using Quantized = CudaTest;

TEST_F(Quantized, BitsOfTheProductWithTheDecodedWeight) {
  const int64_t shapes[][3] = {{1, 64, 64},     {3, 40, 192},    {16, 1000, 2880},
                               {17, 513, 1088}, {64, 4100, 512}, {150, 96, 640}};
  for (const Kind& kind : kKinds) {
    for (const auto& [m, n, k] : shapes) {
      const Weight weight(kind.format, kind.blocks, kind.outer, 1, n, k);
      const Buffer x(normal(m * k, 1.0f)), x_scales(floats_between(m, 0.5f, 2.0f)), bias(normal(n, 1.0f));
      const Buffer decoded_weight(static_cast<std::size_t>(2 * n * k)), sums(static_cast<std::size_t>(4 * m * n)),
          out(static_cast<std::size_t>(2 * m * n)), expected(static_cast<std::size_t>(2 * m * n)),
          row(static_cast<std::size_t>(2 * n));
      cuda::decode_weight(weight.gpu, 1, n, k, DType::kBFloat16, decoded_weight.data(), nullptr);
      const auto values = decoded_weight.host<BFloat16>();
      int64_t wrong = 0;
      for (int64_t i = 0; i < n * k; ++i)
        wrong += values[static_cast<std::size_t>(i)].bits !=
                 from_float<BFloat16>(decoded(weight.host, 0, i / k, i % k)).bits;
      ASSERT_EQ(wrong, 0);

      auto product = plain(x, decoded_weight, sums, m, n, k);
      product.out_dtype = DType::kFloat32;
      ASSERT_TRUE(cuda::matmul(product));
      cuda::QuantizedMatmul a{plain(x, decoded_weight, expected, m, n, k), weight.gpu, x_scales.floats()};
      a.product.w = nullptr;
      a.product.bias = bias.data();
      a.product.activation = cuda::Activation::kSilu;
      cuda::finish_quantized(a, sums.floats());
      a.product.out = out.data();
      ASSERT_TRUE(cuda::quantized_matmul(a));
      EXPECT_TRUE(same(out.host<BFloat16>(), expected.host<BFloat16>()))
          << "format " << int(kind.format) << " m " << m << " n " << n << " k " << k;

      a.product.out = row.data();  // the last row alone
      a.product.x = static_cast<const uint16_t*>(x.data()) + (m - 1) * k;
      a.product.m = 1;
      a.x_scales += m - 1;
      ASSERT_TRUE(cuda::quantized_matmul(a));
      const auto all = out.host<BFloat16>();
      EXPECT_TRUE(same(row.host<BFloat16>(), {all.end() - n, all.end()}));
    }
  }
}

TEST_F(Quantized, DecodedWeightsOfAnySize) {
  for (const Kind& kind : kKinds) {
    for (const int64_t k : {40, 64, 208}) {  // 16 bytes of codes at a time where they fill a row
      const int64_t n = 131, batch = 2;
      const Weight weight(kind.format, kind.blocks, kind.outer, batch, n, k);
      const Buffer decoded_weight(static_cast<std::size_t>(2 * batch * n * k));
      cuda::decode_weight(weight.gpu, batch, n, k, DType::kBFloat16, decoded_weight.data(), nullptr);
      const auto values = decoded_weight.host<BFloat16>();
      int64_t wrong = 0;
      for (int64_t i = 0; i < batch * n * k; ++i)
        wrong += values[static_cast<std::size_t>(i)].bits !=
                 from_float<BFloat16>(decoded(weight.host, i / k / n, i / k % n, i % k)).bits;
      EXPECT_EQ(wrong, 0) << "format " << int(kind.format) << " k " << k;
    }
  }
}

TEST_F(Quantized, WhatIsNotServedSaysSo) {
  const Weight weight(WeightFormat::kNvFp4, false, false, 1, 64, 128);
  const Buffer x(normal(64 * 128, 1.0f)), out(std::size_t{64 * 64 * 2});
  cuda::QuantizedMatmul a{plain(x, out, out, 4, 64, 128), weight.gpu};
  ASSERT_TRUE(cuda::quantized_matmul(a));
  auto odd = a;
  odd.product.k = 96;  // no multiple of 64
  EXPECT_FALSE(cuda::quantized_matmul(odd));
  odd = a;
  odd.w.codes += 8;
  EXPECT_FALSE(cuda::quantized_matmul(odd));
  odd = a;
  odd.product.dtype = DType::kFloat32;
  EXPECT_FALSE(cuda::quantized_matmul(odd));
}

TEST_F(Quantized, ExpertsHaveTheBitsOfDecodedExperts) {
  constexpr int64_t kExperts = 9, kHidden = 192, kWidth = 128, kK = 3;
  for (const Kind& kind : kKinds) {
    if (kind.outer) continue;  // there the decoded weight is not the same number
    const Weight up(kind.format, kind.blocks, false, kExperts, 2 * kWidth, kHidden),
        down(kind.format, kind.blocks, false, kExperts, kHidden, kWidth);
    const Buffer plain_up(std::size_t{2 * kExperts * 2 * kWidth * kHidden}),
        plain_down(std::size_t{2 * kExperts * kHidden * kWidth});
    cuda::decode_weight(up.gpu, kExperts, 2 * kWidth, kHidden, DType::kBFloat16, plain_up.data(), nullptr);
    cuda::decode_weight(down.gpu, kExperts, kHidden, kWidth, DType::kBFloat16, plain_down.data(), nullptr);
    for (const int64_t tokens : {1, 20, 300}) {
      std::vector<int64_t> chosen(static_cast<std::size_t>(tokens * kK));
      std::uniform_int_distribution<int64_t> draw(-1, kExperts - 1);
      for (int64_t& id : chosen) id = draw(engine);
      const Buffer x(normal(tokens * kHidden, 0.3f)), ids(chosen), weights(floats_between(tokens * kK, 0.0f, 1.0f)),
          up_bias(normal(kExperts * 2 * kWidth, 0.1f)), down_bias(normal(kExperts * kHidden, 0.1f));
      const Buffer expected(static_cast<std::size_t>(2 * tokens * kHidden)),
          got(static_cast<std::size_t>(2 * tokens * kHidden));
      cuda::MoeExperts layer{};
      layer.x = x.data();
      layer.ids = static_cast<const int64_t*>(ids.data());
      layer.weights = weights.floats();
      layer.up = plain_up.data();
      layer.down = plain_down.data();
      layer.up_bias = up_bias.data();
      layer.down_bias = down_bias.data();
      layer.y = expected.data();
      layer.tokens = tokens;
      layer.hidden = layer.x_row = kHidden;
      layer.width = kWidth;
      layer.experts = kExperts;
      layer.k = kK;
      layer.activation = GateActivation::kSilu;
      layer.limit = std::numeric_limits<float>::infinity();
      layer.dtype = DType::kBFloat16;
      const Buffer workspace(static_cast<std::size_t>(cuda::moe_experts_workspace(layer)));
      layer.workspace = workspace.data();
      cuda::moe_experts(layer);
      cuda::QuantizedMoe quantized{layer, up.gpu, down.gpu};
      const int64_t bytes = cuda::quantized_moe_workspace(quantized);
      ASSERT_GE(bytes, 0);
      const Buffer own(static_cast<std::size_t>(bytes));
      quantized.layer.workspace = own.data();
      quantized.layer.up = quantized.layer.down = nullptr;
      quantized.layer.y = got.data();
      cuda::quantized_moe(quantized);
      EXPECT_TRUE(same(got.host<BFloat16>(), expected.host<BFloat16>()))
          << "format " << int(kind.format) << " tokens " << tokens;
      if (tokens == 20) {  // alternating gates: another order of rows, the same kernels
        quantized.layer.interleaved = true;
        cuda::quantized_moe(quantized);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      }
    }
  }
}

}  // namespace
}  // namespace quartz::kernels
