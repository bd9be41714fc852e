// Twin storages, statistics, out-of-memory errors. Sizes are multiples of 512 bytes, to which CUDA's allocator rounds.
#include <ATen/ops/empty.h>
#include <ATen/ops/exp.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "aten/alias.h"
#include "common.h"
#include "runtime/allocator.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

constexpr int64_t kKiB = 1024;
constexpr std::size_t kTooMuch = std::size_t{1} << 50;  // bytes; more than any machine has

c10::CachingAllocator::Stat bytes() { return allocator().getDeviceStats(0).allocated_bytes[0]; }
c10::CachingAllocator::Stat blocks() { return allocator().getDeviceStats(0).allocation[0]; }

at::Tensor bytes_of_memory(int64_t count) { return at::empty({count}, quartz_options().dtype(at::kByte)); }

TEST(Allocator, IsTheOneOfTheDeviceType) {
  EXPECT_EQ(c10::GetAllocator(kQuartz), &allocator());
  EXPECT_EQ(c10::getDeviceAllocator(kQuartz), &allocator());
}

TEST(Allocator, MemoryBelongsToANativeTwin) {
  const auto pointer = allocator().allocate(4 * kKiB);
  EXPECT_EQ(pointer.device(), c10::Device(kQuartz, 0));
  const auto x = bytes_of_memory(4 * kKiB);
  auto* twin = twin_of(*x.storage().unsafeGetStorageImpl());
  ASSERT_NE(twin, nullptr);
  EXPECT_EQ(twin->device(), substrate().native_device(0));
  EXPECT_EQ(twin->data(), x.storage().data());
  EXPECT_EQ(twin->nbytes(), x.storage().nbytes());
  EXPECT_EQ(c10::raw::intrusive_ptr::use_count(twin), 1u);
}

TEST(Allocator, AliasSharesTheTwinAndKeepsItsMemory) {
  auto x = on_quartz({1, 2, 3});
  const auto before = bytes();
  auto alias = native_alias(x, AliasKind::kFull);
  EXPECT_EQ(bytes().current, before.current);  // no copy
  EXPECT_EQ(alias.device(), substrate().native_device(0));
  EXPECT_EQ(alias.const_data_ptr(), x.const_data_ptr());
  EXPECT_EQ(alias.storage().unsafeGetStorageImpl(), twin_of(*x.storage().unsafeGetStorageImpl()));
  EXPECT_EQ(alias.storage().use_count(), 2u);
  alias.fill_(7);
  EXPECT_EQ(values_of(x), (std::vector<double>{7, 7, 7}));
  x = at::Tensor();
  EXPECT_EQ(alias.storage().use_count(), 1u);
  EXPECT_EQ(values_of(alias), (std::vector<double>{7, 7, 7}));
}

TEST(Allocator, CurrentBytesAndBlocks) {
  const auto bytes_before = bytes(), blocks_before = blocks();
  {
    const auto a = bytes_of_memory(4 * kKiB), b = bytes_of_memory(8 * kKiB);
    const auto view = b.narrow(0, 5, 100);
    EXPECT_EQ(bytes().current, bytes_before.current + 12 * kKiB);
    EXPECT_EQ(blocks().current, blocks_before.current + 2);
  }
  EXPECT_EQ(bytes().current, bytes_before.current);
  EXPECT_EQ(blocks().current, blocks_before.current);
}

TEST(Allocator, ResultsOfNativeKernelsAreCounted) {
  const auto x = at::empty({kKiB}, quartz_options());
  const auto before = bytes().current;
  const auto y = x.exp();
  EXPECT_EQ(bytes().current, before + 4 * kKiB);
}

TEST(Allocator, PeakIsTheMostAtOneTimeAndCanBeReset) {
  allocator().resetPeakStats(0);
  const auto start = bytes();
  EXPECT_EQ(start.peak, start.current);
  { const auto a = bytes_of_memory(64 * kKiB); }
  { const auto a = bytes_of_memory(16 * kKiB), b = bytes_of_memory(32 * kKiB); }
  EXPECT_EQ(bytes().peak, start.current + 64 * kKiB);  // not 112: never together
  const auto kept = bytes_of_memory(kKiB);
  allocator().resetPeakStats(0);
  EXPECT_EQ(bytes().peak, start.current + kKiB);
  EXPECT_EQ(bytes().peak, bytes().current);
  { const auto a = bytes_of_memory(2 * kKiB); }
  EXPECT_EQ(bytes().peak, start.current + 3 * kKiB);
  EXPECT_EQ(blocks().peak, blocks().current + 1);
}

TEST(Allocator, AccumulatedCountsAndTheirReset) {
  allocator().resetAccumulatedStats(0);
  EXPECT_EQ(bytes().allocated, 0);
  EXPECT_EQ(bytes().freed, 0);
  const auto current = bytes().current;
  for (int i = 0; i < 5; ++i) bytes_of_memory(2 * kKiB);
  const auto kept = bytes_of_memory(kKiB);
  EXPECT_EQ(bytes().allocated, 11 * kKiB);
  EXPECT_EQ(bytes().freed, 10 * kKiB);
  EXPECT_EQ(blocks().allocated, 6);
  EXPECT_EQ(blocks().freed, 5);
  EXPECT_EQ(bytes().current, current + kKiB);
  allocator().resetAccumulatedStats(0);
  EXPECT_EQ(bytes().allocated, 0);
  EXPECT_EQ(bytes().current, current + kKiB);  // a reset forgets the past, not what is alive
}

TEST(Allocator, ZeroBytes) {
  const auto before = bytes();
  const auto pointer = allocator().allocate(0);
  EXPECT_EQ(pointer.device(), c10::Device(kQuartz, 0));
  const auto x = at::empty({0, 3}, quartz_options());
  EXPECT_EQ(x.storage().nbytes(), 0u);
  EXPECT_NE(twin_of(*x.storage().unsafeGetStorageImpl()), nullptr);
  EXPECT_EQ(native_alias(x).sizes(), (at::IntArrayRef{0, 3}));
  EXPECT_EQ(bytes().current, before.current);
}

TEST(Allocator, CopyDataCopiesBetweenBlocks) {
  const auto from = on_quartz({1, 2, 3, 4}), to = on_quartz({0, 0, 0, 0});
  allocator().copy_data(to.mutable_data_ptr(), from.const_data_ptr(), 3 * sizeof(float));
  EXPECT_EQ(values_of(to), (std::vector<double>{1, 2, 3, 0}));
  allocator().copy_data(nullptr, nullptr, 0);
}

TEST(Allocator, MemoryInfo) {
  const auto [free_bytes, total] = allocator().getMemoryInfo(0);
  EXPECT_GT(total, std::size_t{1} << 20);
  EXPECT_LE(free_bytes, total);
  EXPECT_EQ(allocator().getMemoryInfo(-1).second, total);  // -1: the current device
  allocator().emptyCache();
  EXPECT_TRUE(allocator().initialized());
}

TEST(Allocator, UnknownDeviceIsRefused) {
  const auto count = device_count();
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", allocator().getDeviceStats(count));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", allocator().resetPeakStats(count));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", allocator().resetAccumulatedStats(count));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", allocator().getMemoryInfo(count));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", at::empty({1}, quartz_options(count)));
  EXPECT_EQ(current_device(), 0);
  EXPECT_TRUE(still_works());
}

TEST(OutOfMemory, OfTheAllocatorNamesTheNumbers) {
  const auto kept = bytes_of_memory(3 * kKiB * kKiB);
  const auto before = allocator().getDeviceStats(0);
  const std::string allocated = before.allocated_bytes[0].current < 3 * kKiB * kKiB + 5000 ? "Allocated 3.00 MiB" : "";
  try {
    allocator().allocate(kTooMuch);
    FAIL() << "allocated 2^50 bytes";
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_TRUE(contains(text, "quartz out of memory. Tried to allocate 1.00 PiB (1125899906842624 bytes)"));
    EXPECT_TRUE(contains(text, "on device quartz:0 (" + std::string(substrate().name()) + " memory)"));
    EXPECT_TRUE(contains(text, allocated));
    EXPECT_TRUE(contains(text, ", reserved "));
    EXPECT_TRUE(contains(text, ", free "));
  }
  const auto after = allocator().getDeviceStats(0);
  EXPECT_EQ(after.allocated_bytes[0].current, before.allocated_bytes[0].current);
  EXPECT_EQ(after.allocation[0].current, before.allocation[0].current);
  EXPECT_EQ(after.num_ooms, before.num_ooms + 1);
  EXPECT_TRUE(still_works());
}

TEST(OutOfMemory, OfATensorAndOfAnOperator) {
  // 2^48 floats: by the allocator, and by the native kernel of exp, which makes its result on the native device.
  const int64_t count = static_cast<int64_t>(kTooMuch / sizeof(float));
  QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "Tried to allocate 1.00 PiB", at::empty({count}, quartz_options()));
  const auto x = on_quartz({1}).expand({count});
  const auto before = bytes().current;
  QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "quartz out of memory. Tried to allocate 1", x.exp());
  EXPECT_EQ(bytes().current, before);
  EXPECT_TRUE(still_works());
}

TEST(OutOfMemory, OfAResizeLeavesTheTensorAsItWas) {
  const auto x = on_quartz({1, 2, 3});
  const auto before = bytes().current;
  QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "quartz out of memory. Tried to allocate 1",
                      resize_storage(*x.storage().unsafeGetStorageImpl(), kTooMuch));
  EXPECT_EQ(bytes().current, before);
  EXPECT_EQ(x.storage().nbytes(), 12u);
  EXPECT_EQ(values_of(x), (std::vector<double>{1, 2, 3}));
}

TEST(Allocator, ManyThreads) {
  const auto before = allocator().getDeviceStats(0);
  allocator().resetAccumulatedStats(0);
  constexpr int kThreads = 8, kRounds = 200;
  std::atomic<int> wrong{0};
  std::vector<at::Tensor> handed_over(kThreads);  // freed by another thread than the one that allocated
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 1; i <= kRounds; ++i) {
        const auto x = on_quartz(std::vector<float>(256, static_cast<float>(t * kRounds + i)));
        const auto y = x.add(x);
        for (double value : values_of(y)) wrong += value != 2. * (t * kRounds + i);
        if (i == kRounds) handed_over[t] = y;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(bytes().current, before.allocated_bytes[0].current + kThreads * kKiB);
  handed_over.clear();
  EXPECT_EQ(bytes().current, before.allocated_bytes[0].current);
  EXPECT_EQ(bytes().allocated, bytes().freed);
  EXPECT_EQ(blocks().allocated, blocks().freed);
  EXPECT_EQ(blocks().allocated, 2 * kThreads * kRounds);  // x and y; copies to the CPU are not counted
}

}  // namespace
}  // namespace quartz::test
