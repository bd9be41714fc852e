// Storages that change: resizes with views and aliases, memory of another origin, adopted native memory, set_.
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include "aten/alias.h"
#include "common.h"
#include "runtime/allocator.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

int64_t live_bytes() { return allocator().getDeviceStats(0).allocated_bytes[0].current; }

c10::StorageImpl& impl_of(const at::Tensor& tensor) { return *tensor.storage().unsafeGetStorageImpl(); }

// Pointer and size of the quartz storage are its twin's.
void expect_in_step(const at::Tensor& tensor) {
  const auto* twin = twin_of(impl_of(tensor));
  ASSERT_NE(twin, nullptr);
  EXPECT_EQ(impl_of(tensor).data(), twin->data());
  EXPECT_EQ(impl_of(tensor).nbytes(), twin->nbytes());
}

TEST(Resize, UpKeepsTheElementsAndTheViews) {
  auto x = on_quartz(iota(128));
  const auto view = x.narrow(0, 100, 4), alias = native_alias(x);
  const auto before = live_bytes();
  x.resize_({1024});
  EXPECT_EQ(live_bytes(), before + (1024 - 128) * 4);
  expect_in_step(x);
  EXPECT_EQ(impl_of(x).nbytes(), 4096u);
  EXPECT_EQ(values_of(x.narrow(0, 0, 128)), std::vector<double>(values_of(on_cpu(iota(128)))));
  // The view has moved along, and so has the alias that was made before.
  EXPECT_EQ(values_of(view), (std::vector<double>{100, 101, 102, 103}));
  EXPECT_EQ(alias.const_data_ptr(), x.const_data_ptr());
  x.fill_(5);
  EXPECT_EQ(values_of(view), (std::vector<double>{5, 5, 5, 5}));
}

TEST(Resize, OfATensorDownKeepsTheStorage) {
  auto x = on_quartz(iota(256));
  const auto before = live_bytes();
  x.resize_({2, 3});
  EXPECT_EQ(x.storage().nbytes(), 1024u);
  EXPECT_EQ(live_bytes(), before);
  EXPECT_EQ(values_of(x), (std::vector<double>{0, 1, 2, 3, 4, 5}));
  x.resize_({0});
  EXPECT_EQ(x.numel(), 0);
  x.resize_({256});
  EXPECT_EQ(values_of(x).back(), 255);
}

TEST(Resize, OfAStorageToNothingAndBack) {  // as FSDP does with gathered parameters
  auto x = on_quartz(iota(256));
  const auto view = x.narrow(0, 0, 2);
  const auto before = live_bytes();
  resize_storage(impl_of(x), 0);
  EXPECT_EQ(live_bytes(), before - 1024);
  expect_in_step(x);
  resize_storage(impl_of(x), 1024);
  EXPECT_EQ(live_bytes(), before);
  expect_in_step(x);
  x.fill_(3);
  EXPECT_EQ(values_of(view), (std::vector<double>{3, 3}));
}

TEST(Resize, OfAStorageDownKeepsItsBeginning) {
  const auto x = on_quartz(iota(256));
  const auto head = x.narrow(0, 0, 3);
  const auto before = live_bytes();
  resize_storage(impl_of(x), 512);
  EXPECT_EQ(live_bytes(), before - 512);
  EXPECT_EQ(values_of(head), (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(values_of(head.add(head)), (std::vector<double>{0, 2, 4}));
}

TEST(Resize, FromZeroBytes) {
  auto x = at::empty({0}, quartz_options());
  x.resize_({3}).fill_(2);
  expect_in_step(x);
  EXPECT_EQ(values_of(x), (std::vector<double>{2, 2, 2}));
}

TEST(Resize, ByTheOutOfAnOperator) {
  auto out = at::empty({0}, quartz_options()), other = out.view({0, 1});
  const auto before = live_bytes();
  at::add_out(out, on_quartz(iota(128)), on_quartz(iota(128)));
  EXPECT_EQ(live_bytes(), before + 512);
  expect_in_step(out);
  EXPECT_EQ(values_of(out)[127], 254);
  EXPECT_EQ(other.storage().data(), out.storage().data());
  allocator().resetPeakStats(0);
  EXPECT_EQ(allocator().getDeviceStats(0).allocated_bytes[0].peak, before + 512);
}

TEST(Resize, ByAnOperatorThatThenFails) {
  // The native kernel makes room in `out` before it finds the wrong index.
  auto out = at::empty({0}, quartz_options());
  const auto index = on_quartz({0, 1, 1000}).to(at::kLong);
  if (!substrate().is_cuda()) {  // an assertion in a CUDA kernel is the end of the process
    EXPECT_THROW(at::index_select_out(out, on_quartz(iota(4)), 0, index), c10::Error);
  }
  expect_in_step(out);
  EXPECT_TRUE(still_works());
  EXPECT_NO_THROW(at::index_select_out(out, on_quartz(iota(4)), 0, index.narrow(0, 0, 2)));
  EXPECT_EQ(values_of(out), (std::vector<double>{0, 1}));
}

// A block that the test owns, as a tensor of quartz.
class Blob : public ::testing::Test {
 protected:
  at::Tensor owner = at::arange(6, native_options());
  int freed = 0;
  at::Tensor blob() {
    return at::from_blob(
        owner.mutable_data_ptr(), {6}, [this](void*) { ++freed; }, quartz_options(), c10::Device(kQuartz, 0));
  }
};

TEST_F(Blob, IsUsedInPlaceAndFreedOnce) {
  const auto before = live_bytes();
  {
    auto x = blob();
    EXPECT_EQ(x.device(), c10::Device(kQuartz, 0));
    EXPECT_EQ(twin_of(impl_of(x)), nullptr);
    x.add_(1);
    const auto view = x.narrow(0, 1, 2).mul(10);
    EXPECT_EQ(values_of(view), (std::vector<double>{20, 30}));
    EXPECT_NE(twin_of(impl_of(view)), nullptr);
    EXPECT_EQ(native_alias(x).const_data_ptr(), owner.const_data_ptr());
    EXPECT_EQ(freed, 0);
  }
  EXPECT_EQ(freed, 1);
  EXPECT_EQ(values_of(owner), (std::vector<double>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(live_bytes(), before);
}

TEST_F(Blob, ViewsShareItsStorageAndKeepIt) {
  at::Tensor view;
  {
    const auto x = blob();
    view = x.view({2, 3}).select(0, 1);
    EXPECT_TRUE(view.storage().is_alias_of(x.storage()));
  }
  EXPECT_EQ(freed, 0);
  view.mul_(2);
  EXPECT_EQ(values_of(owner), (std::vector<double>{0, 1, 2, 6, 8, 10}));
  view = at::Tensor();
  EXPECT_EQ(freed, 1);
}

TEST_F(Blob, CannotBeResized) {
  auto x = blob();
  QUARTZ_EXPECT_ERROR(c10::Error, "not resizable", x.resize_({100}));
  EXPECT_EQ(values_of(x), (std::vector<double>{0, 1, 2, 3, 4, 5}));
  QUARTZ_EXPECT_ERROR(c10::Error, "resiz", at::add_out(x, on_quartz(iota(100)), on_quartz(iota(100))));
  EXPECT_EQ(x.storage().data(), owner.storage().data());
}

TEST_F(Blob, OverlapIsNoticedAsOnTheNativeDevice) {
  // Two views of one block, written and read with an offset: refused, not computed in an undefined order.
  auto x = blob();
  const auto one = on_quartz({1});
  auto target = x.narrow(0, 1, 5);
  QUARTZ_EXPECT_ERROR(c10::Error, "refer to a single memory location", at::add_out(target, x.narrow(0, 0, 5), one));
  auto native_target = owner.narrow(0, 1, 5);
  QUARTZ_EXPECT_ERROR(c10::Error, "refer to a single memory location",
                      at::add_out(native_target, owner.narrow(0, 0, 5), native_alias(one)));
}

TEST_F(Blob, OfADeviceThatDoesNotExist) {
  const auto x = at::from_blob(
      owner.mutable_data_ptr(), {6}, [](void*) {}, quartz_options(100), c10::Device(kQuartz, 100));
  EXPECT_EQ(twin_of(impl_of(x)), nullptr);  // and not what lies behind the table of deleters
  EXPECT_TRUE(still_works());
}

TEST(Adopt, SharesTheMemoryAndCountsIt) {
  auto native = at::arange(256, native_options());
  const auto before = live_bytes();
  {
    const auto storage = adopt_storage(StoragePtr::reclaim_copy(native.storage().unsafeGetStorageImpl()), 0);
    EXPECT_EQ(storage.data(), native.storage().data());
    EXPECT_EQ(storage.device(), c10::Device(kQuartz, 0));
    EXPECT_EQ(twin_of(*storage.unsafeGetStorageImpl()), native.storage().unsafeGetStorageImpl());
    EXPECT_EQ(live_bytes(), before + (substrate().is_cuda() ? 0 : 1024));
  }
  EXPECT_EQ(live_bytes(), before);
  EXPECT_EQ(native.storage().use_count(), 1u);
  EXPECT_EQ(values_of(native)[255], 255);
}

TEST(Adopt, OutlivesTheNativeTensor) {
  auto native = at::arange(4, native_options());
  AliasScope scope(c10::Device(kQuartz, 0));
  const auto x = scope.to_quartz(native);
  const auto y = scope.to_quartz(native.narrow(0, 1, 2));
  native = at::Tensor();
  x.add_(1);
  EXPECT_EQ(values_of(y), (std::vector<double>{2, 3}));
  EXPECT_TRUE(x.storage().is_alias_of(y.storage()));
}

TEST(Set, TakesOverTheStorage) {
  auto x = on_quartz({1, 2, 3}), y = on_quartz({4, 5, 6, 7});
  x.set_(y);
  EXPECT_TRUE(x.storage().is_alias_of(y.storage()));
  x.mul_(2);
  EXPECT_EQ(values_of(y), (std::vector<double>{8, 10, 12, 14}));
  x.set_(y.storage(), 1, {2}, {2});
  EXPECT_EQ(values_of(x), (std::vector<double>{10, 14}));
  x.set_();
  EXPECT_EQ(x.sizes(), (at::IntArrayRef{0}));
  EXPECT_EQ(x.device(), c10::Device(kQuartz, 0));
}

TEST(Set, RefusesAnotherDeviceAndABadOffset) {
  auto x = on_quartz({1, 2, 3});
  QUARTZ_EXPECT_ERROR(c10::Error, "devices must match", x.set_(on_cpu({1}).storage(), 0, {1}, {1}));
  auto cpu = on_cpu({1});
  EXPECT_THROW(cpu.set_(x.storage(), 0, {1}, {1}), c10::Error);
  QUARTZ_EXPECT_ERROR(c10::Error, "offset", x.set_(x.storage(), -1, {1}, {1}));
  EXPECT_EQ(values_of(x), (std::vector<double>{1, 2, 3}));
}

}  // namespace
}  // namespace quartz::test
