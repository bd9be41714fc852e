#include "runtime/allocator.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <array>
#include <atomic>
#include <sstream>

#include "runtime/guard.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
constexpr auto kAggregate = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// One counted quantity of one host device. One atomic addition for each change: what is there is what came less what
// went.
class Counter {
 public:
  void add(int64_t amount) {
    // Read first: what other threads free at the same moment may still count towards the peak, and nothing is missed.
    const auto gone = freed_.load(std::memory_order_relaxed);
    const auto now = allocated_.fetch_add(amount, std::memory_order_relaxed) + amount - gone;
    for (auto peak = peak_.load(std::memory_order_relaxed);
         now > peak && !peak_.compare_exchange_weak(peak, now, std::memory_order_relaxed);) {
    }
  }
  void subtract(int64_t amount) { freed_.fetch_add(amount, std::memory_order_relaxed); }
  void reset_peak() { peak_.store(current()); }
  void reset_accumulated() {
    const auto freed = freed_.load();
    freed_at_reset_.store(freed);
    allocated_at_reset_.store(allocated_.load());
  }
  void fill(StatArray& array) const {
    auto& stat = array[kAggregate];
    stat.current = current();
    stat.peak = peak_.load();
    stat.freed = freed_.load() - freed_at_reset_.load();
    stat.allocated = allocated_.load() - allocated_at_reset_.load();
  }

 private:
  int64_t current() const {
    const auto freed = freed_.load();  // first: nothing is freed before it was allocated
    return allocated_.load() - freed;
  }

  std::atomic<int64_t> allocated_{0}, freed_{0}, peak_{0};
  std::atomic<int64_t> allocated_at_reset_{0}, freed_at_reset_{0};
};

struct DeviceCounters {
  Counter bytes, blocks;
  std::atomic<int64_t> out_of_memory{0};
};
// Function-local and leaked: a tensor may be freed after the static destructors have run.
std::array<DeviceCounters, kMaxDevices>& counters() {
  static auto* all = new std::array<DeviceCounters, kMaxDevices>;
  return *all;
}

bool counting() {
  static const bool counts = substrate().counts_bytes();
  return counts;
}

void count_alloc(c10::DeviceIndex device, std::size_t nbytes) {
  if (!counting()) return;
  counters()[device].bytes.add(static_cast<int64_t>(nbytes));
  counters()[device].blocks.add(1);
}

// A deleter gets nothing but the context, so the device is part of the function: one deleter a device.
template <int Device>
void delete_twin(void* context) {
  auto twin = StoragePtr::reclaim(static_cast<c10::StorageImpl*>(context));
  if (counting()) {
    counters()[Device].bytes.subtract(static_cast<int64_t>(twin->nbytes()));
    counters()[Device].blocks.subtract(1);
  }
}

template <std::size_t... Device>
constexpr std::array<c10::DeleterFnPtr, kMaxDevices> make_deleters(std::index_sequence<Device...>) {
  return {&delete_twin<Device>...};
}
constexpr auto kDeleters = make_deleters(std::make_index_sequence<kMaxDevices>());

std::string human(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  int unit = 0;
  for (; bytes >= 1024 && unit < 6; ++unit) bytes /= 1024;
  std::ostringstream out;
  out.precision(unit == 0 ? 0 : 2);
  out << std::fixed << bytes << ' ' << units[unit];
  return out.str();
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const auto& native = substrate();
    native.initialize();
    const auto device = current_device();
    try {
      auto* inner = native.native_allocator();
      auto twin = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                        inner->allocate(nbytes), inner, /*resizable=*/true);
      return wrap_twin(std::move(twin), device);
    } catch (const c10::Error&) {
      // Both native allocators throw for nothing else; CUDA's other errors are not c10::Error of this call.
      throw_out_of_memory(device, human(static_cast<double>(nbytes)) + " (" + std::to_string(nbytes) + " bytes)");
    }
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // the context is not the data pointer
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    if (count != 0) substrate().copy_bytes(destination, source, count);
  }

  bool initialized() override { return substrate().initialized(); }
  void emptyCache(c10::MempoolId_t) override { substrate().empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_stream(pointer, stream); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return substrate().device_stats(checked(device));
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override { substrate().reset_accumulated_stats(checked(device)); }
  void resetPeakStats(c10::DeviceIndex device) override { substrate().reset_peak_stats(checked(device)); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return substrate().memory_info(checked(device));
  }

 private:
  static c10::DeviceIndex checked(c10::DeviceIndex device) {
    device = resolve_device(device);
    check_device(device);
    return device;
  }
};

Allocator* instance() {
  static auto* allocator = new Allocator;
  return allocator;
}

}  // namespace

c10::DeviceAllocator& allocator() { return *instance(); }

void register_allocator() { c10::SetAllocator(kQuartz, instance(), /*priority=*/1); }

c10::DataPtr wrap_twin(StoragePtr twin, c10::DeviceIndex device) {
  void* data = twin->mutable_data();  // also materialises a copy-on-write twin
  count_alloc(device, twin->nbytes());
  return {data, twin.release(), kDeleters[device], c10::Device(kQuartz, device)};
}

namespace {

c10::StorageImpl* twin_of(const c10::DataPtr& pointer) {
  const auto device = pointer.device();
  // Memory of another origin may claim any device index.
  if (device.type() != kQuartz || device.index() < 0 || device.index() >= kMaxDevices ||
      pointer.get_deleter() != kDeleters[device.index()]) {
    return nullptr;
  }
  return static_cast<c10::StorageImpl*>(pointer.get_context());
}

}  // namespace

c10::StorageImpl* twin_of(const c10::StorageImpl& storage) { return twin_of(storage.data_ptr()); }

StoragePtr native_storage(const c10::StorageImpl& storage) {
  if (auto* twin = twin_of(storage)) return StoragePtr::reclaim_copy(twin);
  c10::DataPtr borrowed(const_cast<void*>(storage.data()), substrate().native_device(storage.device().index()));
  return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
                                               std::move(borrowed), /*allocator=*/nullptr, /*resizable=*/false);
}

c10::Storage adopt_storage(StoragePtr twin, c10::DeviceIndex device) {
  const auto nbytes = twin->nbytes();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                            wrap_twin(std::move(twin), device), instance(),
                                                            /*resizable=*/true));
}

void follow_twin(c10::StorageImpl& storage, StoragePtr twin) {
  const auto device = storage.device().index();
  // The old DataPtr was counted with the old size and will be discounted with the new one: settle the difference.
  if (counting() && twin_of(storage) == twin.get()) {
    auto& bytes = counters()[device].bytes;
    if (twin->nbytes() >= storage.nbytes()) {
      bytes.add(static_cast<int64_t>(twin->nbytes() - storage.nbytes()));
    } else {
      bytes.subtract(static_cast<int64_t>(storage.nbytes() - twin->nbytes()));
    }
  }
  const auto nbytes = twin->nbytes();
  storage.set_data_ptr_noswap(wrap_twin(std::move(twin), device));
  storage.set_nbytes(nbytes);
}

void unlock_twin(c10::StorageImpl& twin, std::size_t holders) {
  // Without an allocator the memory is another library's, and nobody can resize it.
  if (!twin.resizable() && twin.allocator() != nullptr && c10::raw::intrusive_ptr::use_count(&twin) <= holders) {
    twin.set_resizable(true);
  }
}

void resize_storage(c10::StorageImpl& storage, std::size_t nbytes) {
  auto* twin = twin_of(storage);
  if (twin != nullptr) unlock_twin(*twin, /*holders=*/1);
  TORCH_CHECK(twin != nullptr && storage.resizable(), "Trying to resize storage that is not resizable");
  const auto device = storage.device().index();
  const c10::DeviceGuard guard(storage.device());
  try {
    substrate().resize_bytes(*twin, nbytes);
  } catch (const c10::Error& error) {
    translate_out_of_memory(error, device);
    throw;
  }
  follow_twin(storage, StoragePtr::reclaim_copy(twin));
}

void follow_resized_twin(c10::StorageImpl& storage) {
  auto* twin = twin_of(storage);
  if (twin != nullptr && (storage.data() != twin->data() || storage.nbytes() != twin->nbytes())) {
    follow_twin(storage, StoragePtr::reclaim_copy(twin));
  }
}

void throw_out_of_memory(c10::DeviceIndex device, const std::string& asked) {
  if (counting()) counters()[device].out_of_memory.fetch_add(1);
  const auto stats = substrate().device_stats(device);
  const auto [free_bytes, total_bytes] = substrate().memory_info(device);
  const auto amount = [](const StatArray& array) { return human(static_cast<double>(array[kAggregate].current)); };
  std::ostringstream message;
  message << "quartz out of memory. Tried to allocate " << asked << " on device quartz:" << static_cast<int>(device)
          << " (" << substrate().name() << " memory). Allocated " << amount(stats.allocated_bytes) << ", reserved "
          << amount(stats.reserved_bytes) << ", free " << human(static_cast<double>(free_bytes)) << " of "
          << human(static_cast<double>(total_bytes))
          << ". Free tensors that are no longer needed, or use a smaller batch.";
  C10_THROW_ERROR(OutOfMemoryError, message.str());
}

void translate_out_of_memory(const c10::Error& error, c10::DeviceIndex device) {
  const std::string text = error.what_without_backtrace();
  const bool host = text.find("DefaultCPUAllocator") != std::string::npos;
  if (!host && dynamic_cast<const c10::OutOfMemoryError*>(&error) == nullptr) return;
  if (text.find("quartz out of memory") != std::string::npos) return;  // already ours
  // "... tried to allocate 8000000000 bytes. Error code 12 ..." / "... Tried to allocate 7.45 GiB. GPU 0 ..."
  auto begin = text.find(host ? "tried to allocate " : "Tried to allocate ");
  std::string asked = "memory";
  if (begin != std::string::npos) {
    begin += std::string("tried to allocate ").size();
    auto end = text.find(". ", begin);
    asked = text.substr(begin, end == std::string::npos ? std::string::npos : end - begin);
  }
  throw_out_of_memory(device, asked);
}

c10::CachingDeviceAllocator::DeviceStats host_stats(c10::DeviceIndex device) {
  c10::CachingDeviceAllocator::DeviceStats stats;
  const auto& counter = counters()[device];
  for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
    counter.bytes.fill(*bytes);
  }
  for (auto* blocks : {&stats.allocation, &stats.active, &stats.segment}) counter.blocks.fill(*blocks);
  stats.num_ooms = counter.out_of_memory.load();
  return stats;
}

void reset_host_peak(c10::DeviceIndex device) {
  counters()[device].bytes.reset_peak();
  counters()[device].blocks.reset_peak();
}

void reset_host_accumulated(c10::DeviceIndex device) {
  counters()[device].bytes.reset_accumulated();
  counters()[device].blocks.reset_accumulated();
  counters()[device].out_of_memory.store(0);
}

void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream) {
  const auto* twin = twin_of(pointer);  // null: not the allocator's memory
  if (twin == nullptr || pointer.get() == nullptr) return;
  substrate().record_stream(twin->data_ptr(), native_stream(stream));
}

}  // namespace quartz
