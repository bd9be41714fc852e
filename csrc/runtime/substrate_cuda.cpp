// The cuda substrate: quartz memory, streams and generators are CUDA's own.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/cuda/Resize.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/impl/CUDAGuardImpl.h>
#include <cuda_runtime_api.h>

#include "kernels/philox.h"
#include "runtime/process_cuda.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

constexpr const char* kForkMessage =
    "Cannot re-initialize CUDA in forked subprocess. To use quartz with multiprocessing, you must use the 'spawn' (or "
    "'forkserver') start method";

class CudaSubstrate final : public Substrate {
 public:
  CudaSubstrate()
      : Substrate(
            "cuda", c10::DeviceType::CUDA, c10::DeviceType::CUDA,
            {c10::DispatchKey::CUDA, c10::DispatchKey::SparseCUDA, c10::DispatchKey::SparseCsrCUDA,
             c10::DispatchKey::NestedTensorCUDA, c10::DispatchKey::QuantizedCUDA, c10::DispatchKey::AutogradCUDA}) {}

  const c10::impl::DeviceGuardImplInterface& guard() const override {
    static const auto* guard = new c10::cuda::impl::CUDAGuardImpl;
    return *guard;
  }
  void initialize() const override {
    TORCH_CHECK(!in_bad_fork(), kForkMessage);
    at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  }
  bool initialized() const override { return caching()->initialized(); }
  bool has_context(c10::DeviceIndex device) const override {
    return initialized() && !in_bad_fork() && at::detail::getCUDAHooks().hasPrimaryContext(device);
  }
  bool in_bad_fork() const override { return cuda_in_bad_fork(); }

  c10::Allocator* native_allocator() const override { return caching(); }
  void copy_bytes(void* destination, const void* source, std::size_t count) const override {
    C10_CUDA_CHECK(cudaMemcpy(destination, source, count, cudaMemcpyDeviceToDevice));
  }
  void resize_bytes(c10::StorageImpl& twin, std::size_t nbytes) const override {
    at::native::resize_bytes_cuda(&twin, nbytes);
  }
  void empty_cache() const override { c10::cuda::CUDACachingAllocator::emptyCache(); }
  void record_stream(const c10::DataPtr& pointer, c10::Stream stream) const override {
    caching()->recordStream(pointer, c10::cuda::CUDAStream(stream));
  }
  c10::DeviceIndex device_of_pointer(void* pointer) const override {
    cudaPointerAttributes attributes{};
    C10_CUDA_CHECK(cudaPointerGetAttributes(&attributes, pointer));
    TORCH_CHECK_VALUE(
        attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged,
        "quartz: the specified pointer resides on host memory and is not registered with any CUDA device");
    return static_cast<c10::DeviceIndex>(attributes.device);
  }

  std::pair<std::size_t, std::size_t> memory_info(c10::DeviceIndex device) const override {
    const c10::cuda::CUDAGuard guard(device);
    std::size_t free_bytes = 0, total_bytes = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    return {free_bytes, total_bytes};
  }
  bool counts_bytes() const override { return false; }
  c10::CachingDeviceAllocator::DeviceStats device_stats(c10::DeviceIndex device) const override {
    initialize();
    return caching()->getDeviceStats(device);
  }
  void reset_accumulated_stats(c10::DeviceIndex device) const override {
    initialize();
    caching()->resetAccumulatedStats(device);
  }
  void reset_peak_stats(c10::DeviceIndex device) const override {
    initialize();
    caching()->resetPeakStats(device);
  }

  at::HostAllocator* pinned_allocator() const override { return at::getHostAllocator(c10::DeviceType::CUDA); }
  bool is_pinned(const void* pointer) const override { return at::detail::getCUDAHooks().isPinnedPtr(pointer); }

  at::Generator default_native_generator(c10::DeviceIndex device) const override {
    initialize();
    return at::cuda::detail::getDefaultCUDAGenerator(device);
  }
  at::Generator new_native_generator(c10::DeviceIndex device) const override {
    initialize();
    return at::cuda::detail::createCUDAGenerator(device);
  }
  bool take_captured_blocks(const at::Generator& native, uint64_t blocks,
                            kernels::RandomSource* source) const override {
    if (!is_capturing(native.device().index())) return false;
    auto* generator = at::check_generator<at::CUDAGeneratorImpl>(native);
    const std::lock_guard lock(generator->mutex_);
    // It takes multiples of 4 and at least as many as it is asked for.
    const at::PhiloxCudaState state = generator->philox_cuda_state(blocks);
    TORCH_INTERNAL_ASSERT(state.captured_);
    source->graph_seed = state.seed_.ptr;
    source->graph_offset = state.offset_.ptr;
    source->offset = state.offset_intragraph_;
    return true;
  }

 private:
  static bool is_capturing(c10::DeviceIndex device) {
    cudaStreamCaptureStatus status{};
    C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device).stream(), &status));
    return status == cudaStreamCaptureStatusActive;
  }
  static c10::cuda::CUDACachingAllocator::CUDAAllocator* caching() { return c10::cuda::CUDACachingAllocator::get(); }
};

}  // namespace

const Substrate& cuda_substrate() {
  static const auto* cuda = new CudaSubstrate;
  return *cuda;
}

}  // namespace quartz
