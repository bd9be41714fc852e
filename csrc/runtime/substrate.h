// The memory a quartz device lives on: CUDA memory, or host memory where there is no GPU.
//
// A substrate names the native device whose kernels the fallback runs, and provides what differs between the two:
// allocator, streams, generators, statistics. Everything above this file is written once for both.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <string>
#include <utility>

#include "runtime/device.h"
#include "runtime/export.h"

namespace quartz {

namespace kernels {
struct RandomSource;  // philox.h
}

// The dispatch keys of the native device, one for each kind of tensor.
struct NativeKeys {
  c10::DispatchKey dense, sparse, sparse_csr, nested, quantized, autograd;
};

class Substrate {
 public:
  Substrate(const char* name, c10::DeviceType native, c10::DeviceType guard_type, NativeKeys keys)
      : name_(name), native_(native), guard_type_(guard_type), keys_(keys) {}
  virtual ~Substrate() = default;

  const char* name() const { return name_; }
  c10::DeviceType native_type() const { return native_; }
  const NativeKeys& keys() const { return keys_; }
  bool is_cuda() const { return native_ == c10::DeviceType::CUDA; }

  // "cuda:1" for quartz:1; the CPU has no index.
  c10::Device native_device(c10::DeviceIndex index) const {
    return is_cuda() ? c10::Device(native_, index) : c10::Device(native_);
  }

  // Streams, events and the current device. On cuda this is PyTorch's own CUDA guard, which speaks of cuda devices;
  // on host it is ours and speaks of quartz devices.
  virtual const c10::impl::DeviceGuardImplInterface& guard() const = 0;
  c10::Device guard_device(c10::DeviceIndex index) const { return c10::Device(guard_type_, index); }

  // Makes the native runtime ready (CUDA context); cheap after the first call.
  virtual void initialize() const = 0;
  virtual bool initialized() const = 0;
  // Whether the device has been used, so that it has a context (host: always). Asking creates none.
  virtual bool has_context(c10::DeviceIndex device) const = 0;
  // True in a process that was forked from one in which the native runtime had started; initialize() raises there.
  virtual bool in_bad_fork() const = 0;

  // Allocates on the current device.
  virtual c10::Allocator* native_allocator() const = 0;
  virtual void copy_bytes(void* destination, const void* source, std::size_t count) const = 0;
  // Changes the size of a twin storage in place, keeping its first bytes.
  virtual void resize_bytes(c10::StorageImpl& twin, std::size_t nbytes) const = 0;
  virtual void empty_cache() const = 0;
  virtual void record_stream(const c10::DataPtr& native_pointer, c10::Stream stream) const = 0;
  virtual c10::DeviceIndex device_of_pointer(void* pointer) const = 0;

  // Bytes free and in all on the device.
  virtual std::pair<std::size_t, std::size_t> memory_info(c10::DeviceIndex device) const = 0;
  // True when the allocator has to count bytes itself because the native one does not (host).
  virtual bool counts_bytes() const = 0;
  virtual c10::CachingDeviceAllocator::DeviceStats device_stats(c10::DeviceIndex device) const = 0;
  virtual void reset_accumulated_stats(c10::DeviceIndex device) const = 0;
  virtual void reset_peak_stats(c10::DeviceIndex device) const = 0;

  virtual at::HostAllocator* pinned_allocator() const = 0;
  virtual bool is_pinned(const void* pointer) const = 0;

  // The native generator behind the default quartz generator of a device, and a fresh one.
  virtual at::Generator default_native_generator(c10::DeviceIndex device) const = 0;
  virtual at::Generator new_native_generator(c10::DeviceIndex device) const = 0;
  // While the current stream of the generator's device records a CUDA graph: true, and the place in device memory where
  // each replay finds that native generator's seed and the offset of `blocks` blocks of four random words.
  virtual bool take_captured_blocks(const at::Generator& native, uint64_t blocks,
                                    kernels::RandomSource* source) const = 0;

 private:
  const char* name_;
  c10::DeviceType native_, guard_type_;
  NativeKeys keys_;
};

// The substrate of this process, chosen at the first call and then fixed.
QUARTZ_API const Substrate& substrate();

// One sentence: why that substrate was chosen.
QUARTZ_API const std::string& substrate_reason();

// Both are leaked on purpose: tensors may outlive every static destructor.
QUARTZ_API const Substrate& host_substrate();
#if QUARTZ_WITH_CUDA
const Substrate& cuda_substrate();
#endif

}  // namespace quartz
