// Pinned host memory: the host allocator of the device type.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <thread>

#include "common.h"
#include "runtime/guard.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

at::HostAllocator& pinned() { return *at::getHostAllocator(kQuartz); }

TEST(Pinned, IsTheHostAllocatorOfTheDeviceType) {
  EXPECT_EQ(&pinned(), substrate().pinned_allocator());
  EXPECT_NO_THROW(pinned().empty_cache());
}

TEST(Pinned, MemoryIsKnownByEveryAddressInIt) {
  const char* begin = nullptr;
  {
    const auto block = pinned().allocate(1000);
    EXPECT_TRUE(block.device().is_cpu());
    begin = static_cast<const char*>(block.get());
    std::memset(block.get(), 7, 1000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(begin) % 64, 0u);
    EXPECT_TRUE(substrate().is_pinned(begin));
    EXPECT_TRUE(substrate().is_pinned(begin + 999));
    if (substrate().is_cuda()) return;  // CUDA's blocks are larger and stay in its cache
    EXPECT_FALSE(substrate().is_pinned(begin + 1000));
    EXPECT_FALSE(substrate().is_pinned(begin - 1));
  }
  EXPECT_FALSE(substrate().is_pinned(begin));
}

TEST(Pinned, OrdinaryMemoryIsNot) {
  const int local = 0;
  EXPECT_FALSE(substrate().is_pinned(&local));
  EXPECT_FALSE(substrate().is_pinned(nullptr));
  EXPECT_FALSE(on_cpu({1}).is_pinned());
}

TEST(Pinned, ZeroBytes) {
  const auto empty = pinned().allocate(0), other = pinned().allocate(0);
  if (!substrate().is_cuda()) {
    EXPECT_NE(empty.get(), other.get());
  }
}

TEST(Pinned, Tensors) {
  const auto x = on_cpu({1, 2, 3});
  const auto y = x.pin_memory();
  EXPECT_TRUE(y.is_pinned());
  EXPECT_TRUE(y.is_cpu());
  EXPECT_TRUE(y.narrow(0, 1, 2).is_pinned());
  EXPECT_FALSE(x.is_pinned());
  EXPECT_EQ(values_of(y), (std::vector<double>{1, 2, 3}));
  EXPECT_TRUE(y.pin_memory().is_same(y));
  EXPECT_TRUE(at::empty({4}, at::TensorOptions(at::kFloat).pinned_memory(true)).is_pinned());
  EXPECT_THROW(on_quartz({1}).pin_memory(), c10::Error);
}

TEST(Pinned, CopiesWithoutBlocking) {
  const auto source = on_cpu(iota(1000)).pin_memory();
  const auto x = source.to(c10::Device(kQuartz, 0), at::kFloat, /*non_blocking=*/true);
  auto back = at::empty({1000}, at::TensorOptions(at::kFloat).pinned_memory(true));
  back.copy_(x, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl guard(kQuartz);
  const auto stream = guard.getStream(c10::Device(kQuartz, 0));
  EXPECT_TRUE(
      pinned().record_event(back.mutable_data_ptr(), back.storage().data_ptr().get_context(), native_stream(stream)));
  guard.synchronizeDevice(0);
  EXPECT_EQ(values_of(back), values_of(source));
}

TEST(Pinned, OutOfMemory) {
  EXPECT_THROW(pinned().allocate(std::size_t{1} << 60), c10::Error);
  if (!substrate().is_cuda()) {
    QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "Tried to allocate 1152921504606846976 bytes of pinned host memory",
                        pinned().allocate(std::size_t{1} << 60));
    QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "Tried to allocate 18446744073709551615 bytes",
                        pinned().allocate(~std::size_t{0}));
  }
  EXPECT_TRUE(substrate().is_pinned(pinned().allocate(8).get()));
}

TEST(Pinned, ManyThreads) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 500; ++i) {
        const auto block = pinned().allocate(16 + 8 * i);
        EXPECT_TRUE(substrate().is_pinned(static_cast<const char*>(block.get()) + 8 * i));
        std::memset(block.get(), t, 16 + 8 * i);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace
}  // namespace quartz::test
