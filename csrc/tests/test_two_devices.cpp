// Several devices in one process: always two host devices here (CMakeLists.txt sets the variables).
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "aten/alias.h"
#include "common.h"
#include "operators.h"
#include "runtime/allocator.h"
#include "runtime/generator.h"

namespace quartz::test {
namespace {

using Numbers = std::vector<double>;

const c10::Device kFirst(kQuartz, 0), kSecond(kQuartz, 1);
std::string mixed(const std::string& op, const std::string& argument) {
  return "Expected all tensors to be on the same device, but found at least two devices, quartz:0 and quartz:1! "
         "(operator " +
         op + ", argument '" + argument + "')";
}

int64_t live_bytes(c10::DeviceIndex device) { return allocator().getDeviceStats(device).allocated_bytes[0].current; }

TEST(TwoDevices, AreThere) {
  ASSERT_EQ(device_count(), 2);
  EXPECT_TRUE(still_works(0));
  EXPECT_TRUE(still_works(1));
}

TEST(TwoDevices, ResultsAreOnTheDeviceOfTheArguments) {
  const auto x = on_quartz({1, 2}, 1);
  EXPECT_EQ(current_device(), 0);
  EXPECT_EQ(x.device(), kSecond);
  EXPECT_EQ(x.add(x).device(), kSecond);
  EXPECT_EQ(at::cat({x, x}).device(), kSecond);
  EXPECT_EQ(call_one("twice", x).device(), kSecond);
  EXPECT_EQ(call_one("tail", x).device(), kSecond);
  EXPECT_EQ(at::ones({2}, quartz_options(1)).device(), kSecond);
  EXPECT_EQ(at::empty_like(x).device(), kSecond);
  EXPECT_EQ(current_device(), 0);
  const c10::DeviceGuard scope(kSecond);
  EXPECT_EQ(on_quartz({1}, 0).mul(2).device(), kFirst);
}

TEST(TwoDevices, EachCountsItsOwnMemory) {
  const auto first = live_bytes(0), second = live_bytes(1);
  {
    const auto a = at::empty({100}, quartz_options(1));
    EXPECT_EQ(live_bytes(0), first);
    EXPECT_EQ(live_bytes(1), second + 400);
    const auto b = a.exp();
    EXPECT_EQ(live_bytes(1), second + 800);
    allocator().resetPeakStats(0);
    EXPECT_EQ(allocator().getDeviceStats(0).allocated_bytes[0].peak, first);
    auto c = at::empty({10}, quartz_options(1));
    c.resize_({1000});  // while device 0 is current
    EXPECT_EQ(live_bytes(1), second + 4800);
    EXPECT_EQ(live_bytes(0), first);
    EXPECT_EQ(twin_of(*c.storage().unsafeGetStorageImpl())->data(), c.storage().data());
  }
  EXPECT_EQ(live_bytes(0), first);
  EXPECT_EQ(live_bytes(1), second);
}

TEST(TwoDevices, OutOfMemoryNamesTheDevice) {
  QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "on device quartz:1 (host memory)",
                      at::empty({int64_t{1} << 58}, quartz_options(1)));
  const auto x = on_quartz({1}, 1).expand({int64_t{1} << 58});
  QUARTZ_EXPECT_ERROR(c10::OutOfMemoryError, "on device quartz:1 (host memory)", x.exp());
  EXPECT_EQ(current_device(), 0);
  EXPECT_TRUE(still_works(1));
}

TEST(TwoDevices, CopiesBetweenThemAreCopies) {
  const auto x = on_quartz({1, 2, 3}, 0);
  const auto y = x.to(kSecond);
  EXPECT_EQ(y.device(), kSecond);
  EXPECT_NE(y.const_data_ptr(), x.const_data_ptr());
  x.fill_(0);
  EXPECT_EQ(values_of(y), (Numbers{1, 2, 3}));
  x.copy_(y.mul(2), /*non_blocking=*/true);
  EXPECT_EQ(values_of(x), (Numbers{2, 4, 6}));
  EXPECT_TRUE(x.to(kFirst).is_same(x));
}

TEST(TwoDevices, MixedOperandsAreRefused) {
  const auto x = on_quartz({1, 2, 3}, 0), y = on_quartz({1, 2, 3}, 1);
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("aten::add.Tensor", "other"), x.add(y));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("aten::add_.Tensor", "other"), x.add_(y));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("aten::cat", "tensors"), at::cat({x, y}));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("aten::atan2", "other"), x.atan2(y));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("quartz_test::plus_optional", "y"), call("plus_optional", x, y));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("quartz_test::sum_list", "xs"),
                      call("sum_list", c10::List<at::Tensor>({x, y})));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("quartz_test::of_storage", "storage"), call("of_storage", x, y.storage()));
  auto out = at::empty({3}, quartz_options(1));
  const c10::List<std::optional<at::Tensor>> indices({std::optional<at::Tensor>(y.to(at::kLong))});
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("aten::add.out", "out"), at::add_out(out, x, x));
  QUARTZ_EXPECT_ERROR(c10::Error, mixed("aten::index.Tensor", "indices"), x.index(indices));
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
  EXPECT_TRUE(still_works(0));
  EXPECT_TRUE(still_works(1));
}

TEST(TwoDevices, SetRefusesTheStorageOfTheOther) {
  auto x = on_quartz({1, 2, 3}, 0);
  const auto y = on_quartz({4, 5, 6}, 1);
  QUARTZ_EXPECT_ERROR(c10::Error, "devices must match", x.set_(y));
  QUARTZ_EXPECT_ERROR(c10::Error, "devices must match", x.set_(y.storage()));
  QUARTZ_EXPECT_ERROR(c10::Error, "devices must match", x.set_(y.storage(), 0, {1}, {1}));
  EXPECT_EQ(x.device(), kFirst);
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
  auto z = on_quartz({1}, 1);
  z.set_();
  EXPECT_EQ(z.device(), kSecond);
}

TEST(TwoDevices, DeviceArgument) {
  const auto x = on_quartz({1, 2}, 0);
  const auto there = x.to(kSecond, at::kDouble);
  EXPECT_EQ(there.device(), kSecond);
  Stack stack{c10::IValue(kSecond)};
  find_operator("quartz_test::ones_on").callBoxedForDispatchKey(c10::DispatchKey::PrivateUse1, stack);
  EXPECT_EQ(stack.at(0).toTensor().device(), kSecond);
  const c10::DeviceGuard scope(kSecond);
  stack = {c10::IValue(c10::Device(kQuartz))};  // without an index: the current one
  find_operator("quartz_test::ones_on").callBoxedForDispatchKey(c10::DispatchKey::PrivateUse1, stack);
  EXPECT_EQ(stack.at(0).toTensor().device(), kSecond);
}

TEST(TwoDevices, GeneratorsAreSeparate) {
  auto first = default_generator(0), second = default_generator(1);
  first.set_current_seed(1);
  second.set_current_seed(1);
  const auto a = values_of(at::rand({10}, quartz_options(0)));
  const auto b = values_of(at::rand({10}, quartz_options(1)));
  EXPECT_EQ(a, b);  // a draw on one device does not move the other
  second.set_current_seed(2);
  EXPECT_NE(values_of(at::rand({10}, quartz_options(1))), a);
  EXPECT_EQ(new_generator(1).device(), kSecond);
  EXPECT_EQ(second.clone().device(), kSecond);
}

TEST(TwoDevices, CurrentStreamsAreSeparate) {
  const c10::impl::VirtualGuardImpl guard(kQuartz);
  const auto stream = guard.getNewStream(kSecond);
  const auto first = guard.getStream(kFirst);
  {
    const c10::StreamGuard scope(stream);
    EXPECT_EQ(guard.getStream(kSecond), stream);
    EXPECT_EQ(guard.getStream(kFirst), first);
    EXPECT_EQ(current_device(), 1);
  }
  EXPECT_EQ(current_device(), 0);
  c10::Event event(kQuartz, c10::EventFlag::BACKEND_DEFAULT);
  event.record(stream);
  EXPECT_EQ(event.device(), kSecond);
  event.block(first);  // a stream may wait for an event of another device
  event.synchronize();
}

TEST(TwoDevices, BlocksAreFreedOnTheirDeviceFromAnywhere) {
  const auto before = live_bytes(1);
  auto x = at::empty({128}, quartz_options(1));
  {
    const c10::DeviceGuard scope(kFirst);
    x = at::Tensor();
  }
  EXPECT_EQ(live_bytes(1), before);
}

TEST(TwoDevices, CatIntoAnOutOfTheOther) {
  auto out = at::empty({0}, quartz_options(1));
  EXPECT_THROW(at::cat_out(out, {on_quartz({1}, 0)}), c10::Error);
  EXPECT_EQ(out.device(), kSecond);
}

}  // namespace
}  // namespace quartz::test
