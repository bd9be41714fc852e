#include "runtime/host_pinned.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <shared_mutex>

namespace quartz {
namespace {

constexpr std::size_t kAlignment = 64;  // bytes; as c10's CPU allocator

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    const std::size_t size = std::max<std::size_t>(nbytes, 1);
    const std::size_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
    void* block = rounded < size ? nullptr : std::aligned_alloc(kAlignment, rounded);
    if (block == nullptr) {
      C10_THROW_ERROR(OutOfMemoryError, "quartz out of memory. Tried to allocate " + std::to_string(nbytes) +
                                            " bytes of pinned host memory");
    }
    std::unique_lock lock(mutex_);
    live_[reinterpret_cast<std::uintptr_t>(block)] = size;
    return {block, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool contains(const void* pointer) {
    const auto address = reinterpret_cast<std::uintptr_t>(pointer);
    std::shared_lock lock(mutex_);
    auto block = live_.upper_bound(address);
    if (block == live_.begin()) return false;
    --block;
    return address < block->first + block->second;
  }

  static PinnedAllocator& instance() {
    static auto* allocator = new PinnedAllocator;  // leaked: blocks may be freed at any point of the exit
    return *allocator;
  }

 private:
  // Another thread may hold the lock at a fork, and would never release it in the child.
  PinnedAllocator() {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { new (&instance().mutex_) std::shared_mutex; });
  }

  static void release(void* block) {
    {
      std::unique_lock lock(instance().mutex_);
      instance().live_.erase(reinterpret_cast<std::uintptr_t>(block));
    }
    std::free(block);
  }

  std::shared_mutex mutex_;
  std::map<std::uintptr_t, std::size_t> live_;  // address of a live block -> its size in bytes
};

}  // namespace

at::HostAllocator& host_pinned_allocator() { return PinnedAllocator::instance(); }

bool host_pointer_is_pinned(const void* pointer) { return PinnedAllocator::instance().contains(pointer); }

}  // namespace quartz
