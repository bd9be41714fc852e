// Tests of CUDA kernels through their C++ interface: GPU memory, and what skips them on machines without such a GPU.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <vector>

namespace quartz::kernels {

// Base of the fixtures: the kernels are built for sm_90a.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int devices = 0, major = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    if (major != 9) GTEST_SKIP() << "not sm_90";
  }
};

// Filled with NaN of every type, 256 bytes behind the end too, so that what a kernel reads there shows.
class Buffer {
 public:
  explicit Buffer(std::size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, bytes + 256), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, bytes + 256), cudaSuccess);
  }
  template <class T>
  explicit Buffer(const std::vector<T>& values) : Buffer(values.size() * sizeof(T)) {
    EXPECT_EQ(cudaMemcpy(data_, values.data(), bytes_, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  void* data() const { return data_; }
  const float* floats() const { return static_cast<const float*>(data_); }
  template <class T>
  std::vector<T> host() const {
    std::vector<T> values(bytes_ / sizeof(T));
    EXPECT_EQ(cudaMemcpy(values.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    return values;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

}  // namespace quartz::kernels
