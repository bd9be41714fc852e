// Host side of the tile kernels: tensor maps, and launches with clusters and programmatic dependent launch.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "kernels/dtype.h"

namespace quartz::kernels::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Multiprocessors of the current device.
int multiprocessors();

// A tensor for the copy engine: extents and strides innermost first, the innermost stride being one element.
// `box` is what one copy brings; rows of 128 (or 64) bytes are swizzled.
struct MapDimension {
  int64_t extent;
  int64_t stride;  // in elements; ignored for the first dimension
  int box;
};
// `l2_bytes` (128 or 256) is what the second-level cache fetches for a copy at least.
CUtensorMap tensor_map(const void* data, DType dtype, std::initializer_list<MapDimension> dimensions,
                       int l2_bytes = 256);

struct LaunchShape {
  dim3 grid;
  int threads, shared_bytes;
  int cluster_x = 1, cluster_y = 1;
  // Programmatic dependent launch: the kernel may start before the one before it has ended, and must call
  // wait_for_previous_kernel before it touches what that may have written. It pays where something can be read before
  // that; otherwise the plain launch is faster.
  bool early = false;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), const LaunchShape& shape, void* stream, const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2];
  if (shape.early) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster_x * shape.cluster_y > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster_x), static_cast<unsigned>(shape.cluster_y), 1};
  }
  config.attrs = attributes;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "launch of a quartz kernel");
}

// Once per kernel and device: its dynamic shared memory may be larger than 48 KB. `done` belongs to the kernel.
template <class Kernel>
void allow_shared_bytes(Kernel kernel, int bytes, std::atomic<uint64_t>& done) {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const uint64_t bit = uint64_t{1} << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return;
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        "shared memory of a quartz kernel");
  done.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace quartz::kernels::cuda
