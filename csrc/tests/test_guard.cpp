// The current device: the functions of runtime/device.h, the registered guard and c10's guard classes over it.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <stdexcept>
#include <thread>

#include "common.h"

namespace quartz::test {
namespace {

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl impl(kQuartz);
  return impl;
}

c10::Device quartz_device(c10::DeviceIndex index) { return c10::Device(kQuartz, index); }

class GuardTest : public ::testing::Test {
 protected:
  void SetUp() override { set_device(0); }
  void TearDown() override { set_device(0); }
};

TEST_F(GuardTest, IsRegistered) {
  EXPECT_EQ(c10::get_privateuse1_backend(), "quartz");
  EXPECT_TRUE(c10::impl::hasDeviceGuardImpl(kQuartz));
  EXPECT_EQ(guard().type(), kQuartz);
  EXPECT_GE(device_count(), 1);
  EXPECT_LE(device_count(), kMaxDevices);
  EXPECT_EQ(guard().deviceCount(), device_count());
  EXPECT_EQ(guard().getDevice(), quartz_device(0));
  EXPECT_EQ(c10::Device("quartz:0"), quartz_device(0));
}

TEST_F(GuardTest, EveryDeviceCanBeMadeCurrent) {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    guard().setDevice(quartz_device(i));
    EXPECT_EQ(current_device(), i);
    EXPECT_EQ(guard().getDevice(), quartz_device(i));
    EXPECT_EQ(guard().exchangeDevice(quartz_device(0)), quartz_device(i));
    EXPECT_EQ(current_device(), 0);
    guard().uncheckedSetDevice(quartz_device(i));
    EXPECT_EQ(current_device(), i);
    EXPECT_EQ(exchange_device(0), i);
    set_device(i);
    EXPECT_EQ(resolve_device(-1), i);
    EXPECT_EQ(resolve_device(0), 0);
  }
}

TEST_F(GuardTest, ANegativeIndexChangesNothing) {
  const auto last = static_cast<c10::DeviceIndex>(device_count() - 1);
  set_device(last);
  EXPECT_EQ(exchange_device(-1), last);
  guard().setDevice(c10::Device(kQuartz));
  EXPECT_EQ(guard().exchangeDevice(c10::Device(kQuartz)), quartz_device(last));
  { const c10::DeviceGuard no_index{c10::Device(kQuartz)}; }
  EXPECT_EQ(current_device(), last);
}

TEST_F(GuardTest, AnUnknownDeviceIsRefusedAndTheCurrentOneStays) {
  const auto count = device_count();
  const auto last = static_cast<c10::DeviceIndex>(count - 1);
  const std::string range = count == 1 ? "there is 1 device (quartz:0)"
                                       : "there are " + std::to_string(count) +
                                             " devices (quartz:0 to quartz:" + std::to_string(count - 1) + ")";
  set_device(last);
  const auto text = "quartz: invalid device ordinal " + std::to_string(count) + ": " + range;
  QUARTZ_EXPECT_ERROR(c10::Error, text, set_device(count));
  QUARTZ_EXPECT_ERROR(c10::Error, text, exchange_device(count));
  QUARTZ_EXPECT_ERROR(c10::Error, text, guard().setDevice(quartz_device(count)));
  QUARTZ_EXPECT_ERROR(c10::Error, text, guard().exchangeDevice(quartz_device(count)));
  QUARTZ_EXPECT_ERROR(c10::Error, text, const c10::DeviceGuard scope(quartz_device(count)));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal -1", set_device(-1));
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal 120", check_device(120));
  EXPECT_EQ(current_device(), last);
  EXPECT_TRUE(still_works(last));
}

TEST_F(GuardTest, UncheckedSetIgnoresAnUnknownDevice) {  // it is noexcept and runs in destructors
  set_device(static_cast<c10::DeviceIndex>(device_count() - 1));
  const auto before = current_device();
  guard().uncheckedSetDevice(quartz_device(-1));
  EXPECT_EQ(current_device(), before);
  guard().uncheckedSetDevice(quartz_device(device_count()));
  EXPECT_EQ(current_device(), before);
}

TEST_F(GuardTest, AnotherDeviceTypeIsRefused) {
  QUARTZ_EXPECT_ERROR(c10::Error, "expected a quartz device, got cpu", guard().setDevice(c10::Device("cpu")));
  EXPECT_EQ(current_device(), 0);
}

TEST_F(GuardTest, RestoresOnException) {
  const auto last = static_cast<c10::DeviceIndex>(device_count() - 1);
  try {
    const c10::DeviceGuard scope(quartz_device(last));
    EXPECT_EQ(current_device(), last);
    EXPECT_EQ(scope.original_device(), quartz_device(0));
    throw std::runtime_error("in the scope");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(current_device(), 0);
  try {  // a kernel that fails
    const c10::OptionalDeviceGuard scope(quartz_device(last));
    on_quartz({1, 2}).add(on_quartz({1, 2, 3}));
    FAIL() << "shapes (2) and (3) were added";
  } catch (const c10::Error&) {
  }
  EXPECT_EQ(current_device(), 0);
}

TEST_F(GuardTest, NestedScopes) {
  const auto last = static_cast<c10::DeviceIndex>(device_count() - 1);
  {
    c10::DeviceGuard outer(quartz_device(last));
    { const c10::DeviceGuard inner(quartz_device(0)); }
    EXPECT_EQ(current_device(), last);
    outer.set_index(0);
    EXPECT_EQ(current_device(), 0);
    EXPECT_EQ(outer.current_device(), quartz_device(0));
  }
  EXPECT_EQ(current_device(), 0);
}

TEST_F(GuardTest, MemoryIsMadeOnTheCurrentDevice) {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
    const c10::DeviceGuard scope(quartz_device(i));
    EXPECT_EQ(at::empty({3}, at::TensorOptions(kQuartz)).device(), quartz_device(i));
    EXPECT_EQ(at::empty({3}, quartz_options(0)).device(), quartz_device(0));
    EXPECT_EQ(current_device(), i);
  }
}

TEST_F(GuardTest, EveryThreadHasItsOwnCurrentDevice) {
  const auto last = static_cast<c10::DeviceIndex>(device_count() - 1);
  set_device(last);
  c10::DeviceIndex seen = -1;
  std::thread([&] {
    seen = current_device();
    set_device(0);
  }).join();
  EXPECT_EQ(seen, 0);
  EXPECT_EQ(current_device(), last);
}

}  // namespace
}  // namespace quartz::test
