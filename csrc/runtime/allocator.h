// Twin storages: the memory of every quartz tensor belongs to a native storage (CPU or CUDA) over the same bytes.
//
//   quartz StorageImpl --DataPtr(context = twin)--> native StorageImpl (the twin) --DataPtr--> native allocator's block
//
// The context pointer of a quartz DataPtr *is* the twin (one reference held, dropped by the deleter), so an alias on
// the native device costs no allocation besides its TensorImpl. PyTorch's own machinery (CUDA caching allocator,
// record_stream, IPC, graph pools) sees genuine native blocks.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include "runtime/device.h"
#include "runtime/export.h"

namespace quartz {

using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;

QUARTZ_API c10::DeviceAllocator& allocator();
void register_allocator();

// A DataPtr of device quartz:`device` that owns `twin`.
QUARTZ_API c10::DataPtr wrap_twin(StoragePtr twin, c10::DeviceIndex device);

// The twin of a storage that our allocator made, or null for memory of another origin (from_blob, DLPack capsules).
QUARTZ_API c10::StorageImpl* twin_of(const c10::StorageImpl& storage);

// The twin, or for memory of another origin a native storage that borrows the bytes: `storage` must outlive it.
QUARTZ_API StoragePtr native_storage(const c10::StorageImpl& storage);

// A quartz storage over an existing native storage, without a copy.
QUARTZ_API c10::Storage adopt_storage(StoragePtr twin, c10::DeviceIndex device);

// Memory that is known outside the library under its native name (torch.quartz.native_alias and adopt, NumPy) is
// locked: its storage is not resizable, since the one of both storages that is not resized would keep the old address.
// Once nobody but `holders` references holds the twin, the lock is taken off.
void unlock_twin(c10::StorageImpl& twin, std::size_t holders);

// Storage.resize_: resizes the twin and lets the quartz storage follow.
void resize_storage(c10::StorageImpl& storage, std::size_t nbytes);

// After a native kernel has resized the twin: pointer, size and statistics of the quartz storage follow.
void follow_twin(c10::StorageImpl& storage, StoragePtr twin);
// The same with the twin it has, where that was resized.
void follow_resized_twin(c10::StorageImpl& storage);

// Throws torch.OutOfMemoryError: what was asked, the device, what is allocated, reserved and free.
[[noreturn]] QUARTZ_API void throw_out_of_memory(c10::DeviceIndex device, const std::string& asked);

// If `error` is a native allocator's out-of-memory error, throws the quartz one; else returns.
void translate_out_of_memory(const c10::Error& error, c10::DeviceIndex device);

// Byte counts of host devices; CUDA's allocator counts for itself.
c10::CachingDeviceAllocator::DeviceStats host_stats(c10::DeviceIndex device);
void reset_host_peak(c10::DeviceIndex device);
void reset_host_accumulated(c10::DeviceIndex device);

}  // namespace quartz
