// Streams and events of every device, as c10 uses them through the registered guard.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <set>
#include <thread>

#include "common.h"
#include "runtime/guard.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using c10::EventFlag;

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl impl(kQuartz);
  return impl;
}
c10::Device quartz_device(c10::DeviceIndex index) { return c10::Device(kQuartz, index); }

// The tests run on every device of the process: two in the run with TORCH_QUARTZ_HOST_DEVICES=2.
class Streams : public ::testing::TestWithParam<int> {
 protected:
  c10::Device device() const { return quartz_device(static_cast<c10::DeviceIndex>(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Devices, Streams, ::testing::Range(0, static_cast<int>(device_count())));

TEST_P(Streams, TheDefaultStreamIsCurrentAtFirst) {
  const auto stream = guard().getDefaultStream(device());
  EXPECT_EQ(stream.device(), device());
  EXPECT_EQ(stream.id(), 0);
  EXPECT_EQ(guard().getStream(device()), stream);
}

TEST_P(Streams, NewStreamsDiffer) {
  std::set<c10::StreamId> ids{0};
  for (int i = 0; i < 4; ++i) {
    for (const auto& stream : {guard().getNewStream(device()), guard().getStreamFromGlobalPool(device(), true)}) {
      EXPECT_EQ(stream.device(), device());
      EXPECT_TRUE(ids.insert(stream.id()).second) << "two streams with id " << stream.id();
    }
  }
}

TEST_P(Streams, ExchangeReturnsThePreviousOne) {
  const auto first = guard().getStream(device()), second = guard().getNewStream(device());
  EXPECT_EQ(guard().exchangeStream(second), first);
  EXPECT_EQ(guard().getStream(device()), second);
  std::thread([&] { EXPECT_EQ(guard().getStream(device()), first); }).join();  // a current stream a thread
  EXPECT_EQ(guard().exchangeStream(first), second);
  EXPECT_EQ(guard().getStream(device()), first);
}

TEST_P(Streams, GuardSetsDeviceAndStreamAndRestoresBoth) {
  const auto device_before = current_device();
  const auto before = guard().getStream(device()), stream = guard().getNewStream(device());
  try {
    const c10::StreamGuard scope(stream);
    EXPECT_EQ(current_device(), GetParam());
    EXPECT_EQ(guard().getStream(device()), stream);
    EXPECT_TRUE(still_works(device().index()));
    throw std::runtime_error("in the scope");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(current_device(), device_before);
  EXPECT_EQ(guard().getStream(device()), before);
}

TEST_P(Streams, NativeStreamHasTheSameIdAndDeviceIndex) {
  const auto stream = guard().getNewStream(device());
  const auto native = native_stream(stream);
  EXPECT_EQ(native.id(), stream.id());
  EXPECT_EQ(native.device(), substrate().guard_device(device().index()));
}

TEST_P(Streams, WorkIsDoneAfterSynchronize) {
  const auto stream = guard().getNewStream(device());
  guard().synchronizeStream(stream);
  EXPECT_TRUE(guard().queryStream(stream));
  guard().synchronizeDevice(device().index());
  stream.synchronize();
  EXPECT_TRUE(stream.query());
}

TEST_P(Streams, RecordStream) {
  const auto stream = guard().getNewStream(device());
  auto x = on_quartz({1, 2, 3}, device().index());
  x.record_stream(stream);
  x.narrow(0, 1, 1).record_stream(stream);
  at::empty({0}, quartz_options(device().index())).record_stream(stream);
  auto native = at::empty({2}, native_options(device().index()));
  at::from_blob(
      native.mutable_data_ptr(), {2}, [](void*) {}, quartz_options(device().index()), device())
      .record_stream(stream);  // not ours to recycle: nothing to record
  record_stream(c10::DataPtr(), stream);
  EXPECT_EQ(values_of(x), (std::vector<double>{1, 2, 3}));
}

TEST_P(Streams, EventBeforeAndAfterRecording) {
  c10::Event event(kQuartz, EventFlag::BACKEND_DEFAULT);
  EXPECT_FALSE(event.was_marked_for_recording());
  EXPECT_TRUE(event.query());
  EXPECT_EQ(event.eventId(), nullptr);
  const auto stream = guard().getStream(device());
  event.block(stream);  // not recorded: nothing to wait for
  event.synchronize();

  event.record(stream);
  EXPECT_TRUE(event.was_marked_for_recording());
  EXPECT_EQ(event.device(), device());
  EXPECT_NE(event.eventId(), nullptr);
  event.block(guard().getNewStream(device()));
  event.synchronize();
  EXPECT_TRUE(event.query());
}

TEST_P(Streams, ElapsedTime) {
  c10::Event start(kQuartz, EventFlag::BACKEND_DEFAULT), end(kQuartz, EventFlag::BACKEND_DEFAULT);
  const auto stream = guard().getStream(device());
  start.record(stream);
  start.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  end.record(stream);
  end.synchronize();
  const std::chrono::duration<double, std::milli> outer = std::chrono::steady_clock::now() - begin;
  const double elapsed = start.elapsedTime(end);
  EXPECT_GE(elapsed, 19.9);  // a sleep is never shorter, a GPU's clock has ticks
  EXPECT_NEAR(end.elapsedTime(start), -elapsed, 1e-3);
  EXPECT_EQ(start.elapsedTime(start), 0);
  EXPECT_GT(outer.count(), 0);

  start.record(stream);  // a second record moves it
  start.synchronize();
  EXPECT_LE(start.elapsedTime(end), 0);
}

TEST_P(Streams, EventsMayOutliveTheThreadThatRecordedThem) {
  c10::Event event(kQuartz, EventFlag::BACKEND_DEFAULT);
  std::thread([&] { event.record(guard().getStream(device())); }).join();
  EXPECT_TRUE(event.query());
  c10::Event moved = std::move(event);
  moved.synchronize();
  EXPECT_NE(moved.eventId(), nullptr);
}

TEST(Events, TimeBetweenUnrecordedEventsIsAnError) {
  c10::Event start(kQuartz, EventFlag::BACKEND_DEFAULT), end(kQuartz, EventFlag::BACKEND_DEFAULT);
  QUARTZ_EXPECT_ERROR(c10::Error, "must be recorded", start.elapsedTime(end));
  start.record(guard().getStream(quartz_device(0)));
  QUARTZ_EXPECT_ERROR(c10::Error, "must be recorded", start.elapsedTime(end));
  QUARTZ_EXPECT_ERROR(c10::Error, "must be recorded", end.elapsedTime(start));
  // Without c10's own check in front.
  QUARTZ_EXPECT_ERROR(c10::Error, "must be recorded", guard().elapsedTime(nullptr, nullptr, 0));
  QUARTZ_EXPECT_ERROR(c10::Error, "must be recorded", guard().elapsedTime(start.eventId(), nullptr, 0));
  EXPECT_TRUE(still_works());
}

TEST(Events, WithoutTimingHaveNoTime) {
  c10::Event start(kQuartz), end(kQuartz);
  start.record(guard().getStream(quartz_device(0)));
  end.record(guard().getStream(quartz_device(0)));
  QUARTZ_EXPECT_ERROR(c10::Error, "enable_timing", start.elapsedTime(end));
}

TEST(Events, RefuseTheStreamOfAnotherDeviceType) {
  c10::Event event(kQuartz);
  const c10::Stream cpu(c10::Stream::DEFAULT, c10::Device("cpu"));
  QUARTZ_EXPECT_ERROR(c10::Error, "does not match", event.record(cpu));
  EXPECT_FALSE(event.was_marked_for_recording());
}

TEST(StreamErrors, UnknownDevice) {
  const auto unknown = quartz_device(device_count());
  const auto device_before = current_device();
  EXPECT_THROW(guard().getStream(unknown), c10::Error);
  EXPECT_THROW(guard().getDefaultStream(unknown), c10::Error);
  EXPECT_THROW(guard().getNewStream(unknown), c10::Error);
  EXPECT_THROW(guard().getStreamFromGlobalPool(unknown), c10::Error);
  EXPECT_THROW(guard().exchangeStream(c10::Stream(c10::Stream::UNSAFE, unknown, 0)), c10::Error);
  EXPECT_THROW(guard().synchronizeDevice(unknown.index()), c10::Error);
  EXPECT_EQ(current_device(), device_before);
  EXPECT_TRUE(still_works());
}

TEST(StreamErrors, NoIndexMeansTheCurrentDevice) {
  const auto last = static_cast<c10::DeviceIndex>(device_count() - 1);
  const auto before = exchange_device(last);
  EXPECT_EQ(guard().getStream(c10::Device(kQuartz)).device(), quartz_device(last));
  EXPECT_EQ(guard().getDefaultStream(c10::Device(kQuartz)).device(), quartz_device(last));
  EXPECT_EQ(guard().getNewStream(c10::Device(kQuartz)).device(), quartz_device(last));
  exchange_device(before);
}

}  // namespace
}  // namespace quartz::test
