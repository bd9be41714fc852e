#include "kernels/cuda/launch.h"

namespace quartz::kernels::cuda {

int multiprocessors() {
  constexpr int kDevices = 64;
  static std::atomic<int> counts[kDevices];
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<int>& count = counts[device % kDevices];
  int n = count.load(std::memory_order_relaxed);
  if (n == 0) {
    check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device), "multiprocessor count");
    count.store(n, std::memory_order_relaxed);
  }
  return n;
}

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, asked of the runtime, so that nothing links to libcuda.
Encode encode_function() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("this driver lacks cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

}  // namespace

CUtensorMap tensor_map(const void* data, DType dtype, std::initializer_list<MapDimension> dimensions, int l2_bytes) {
  constexpr int kMost = 5;
  cuuint64_t extents[kMost], strides[kMost];
  cuuint32_t box[kMost], steps[kMost];
  const auto bytes = static_cast<cuuint64_t>(size_of(dtype));
  int rank = 0;
  for (const MapDimension& d : dimensions) {
    extents[rank] = static_cast<cuuint64_t>(d.extent);
    if (rank > 0) strides[rank - 1] = static_cast<cuuint64_t>(d.stride) * bytes;
    box[rank] = static_cast<cuuint32_t>(d.box);
    steps[rank] = 1;
    ++rank;
  }
  const cuuint64_t row = box[0] * bytes;
  const auto swizzle = row == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : row == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                   : CU_TENSOR_MAP_SWIZZLE_NONE;
  const auto type = dtype == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  CUtensorMap map;
  const CUresult result =
      encode_function()(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(data), extents, strides, box,
                        steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                        l2_bytes == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with code " + std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace quartz::kernels::cuda
