// Graphs of the host substrate without Python: what is recorded, whose memory a replay uses, what a capture leaves.
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sort.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "common.h"
#include "runtime/allocator.h"
#include "runtime/generator.h"
#include "runtime/graph_host.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

// On the cuda substrate graphs are PyTorch's, which it tests; there is no other case in which these tests do not apply.
class GraphHost : public ::testing::Test {
 protected:
  void SetUp() override {
    if (substrate().is_cuda()) GTEST_SKIP() << "graphs of the cuda substrate are CUDA graphs";
  }
};

c10::Stream side_stream() { return substrate().guard().getNewStream(c10::Device(kQuartz, 0), 0); }

template <class Function>
auto captured(HostGraph& graph, Function&& function) {
  const c10::StreamGuard stream(side_stream());
  graph.capture_begin({0, 0}, CaptureMode::kStrict);
  auto result = function();
  graph.capture_end();
  return result;
}

int64_t live_bytes() { return allocator().getDeviceStats(0).allocated_bytes[0].current; }

TEST_F(GraphHost, ReplaysOnTheRecordedTensors) {
  auto x = on_quartz({1, 2, 3, 4});
  HostGraph graph(/*keep_graph=*/false);
  const auto y = captured(graph, [&] { return x.mul(2).view({2, 2}).t().add(1); });
  const void* address = y.const_data_ptr();
  for (const double value : {5.0, -1.0}) {
    x.fill_(value);
    graph.replay();
    EXPECT_EQ(values_of(y), std::vector<double>(4, value * 2 + 1));
  }
  EXPECT_EQ(y.const_data_ptr(), address);
  EXPECT_TRUE(still_works());
}

TEST_F(GraphHost, InferenceModeAndOutArguments) {
  const c10::InferenceMode inference;
  auto x = on_quartz({3, 1, 2}), out = on_quartz({});
  HostGraph graph(false);
  const auto sorted = captured(graph, [&] {
    at::add_out(out, x, x);
    return std::get<0>(at::sort(at::cat({out, x})));
  });
  x.fill_(2);
  graph.replay();
  EXPECT_EQ(values_of(sorted), (std::vector<double>{2, 2, 2, 4, 4, 4}));
  EXPECT_EQ(values_of(out), (std::vector<double>{4, 4, 4}));
}

TEST_F(GraphHost, ACaptureChangesNothing) {
  auto x = on_quartz(iota(5000));
  auto view = x.narrow(0, 2000, 10);
  const auto& generator = default_generator(0);
  const auto offset = at::Generator(generator).get_offset();
  HostGraph graph(false);
  const auto noise = captured(graph, [&] {
    view.zero_();
    x.add_(1);
    return at::randn({4}, quartz_options());
  });
  EXPECT_EQ(values_of(x), std::vector<double>(values_of(on_cpu(iota(5000)))));
  EXPECT_EQ(at::Generator(generator).get_offset(), offset);
  graph.replay();
  EXPECT_EQ(values_of(x)[2005], 1);
  EXPECT_EQ(values_of(x)[10], 11);
  const auto first = values_of(noise);
  graph.replay();
  EXPECT_NE(first, values_of(noise));
}

TEST_F(GraphHost, IntermediateMemoryIsGivenBack) {
  const auto x = on_quartz(iota(10000));
  const auto before = live_bytes();
  {
    HostGraph graph(false);
    const auto y = captured(graph, [&] {
      auto z = x.mul(2);
      for (int i = 0; i < 5; ++i) z = at::empty_like(z).copy_(z).add(1);
      return z.sum();
    });
    EXPECT_EQ(live_bytes(), before + 4);
    graph.replay();
    EXPECT_EQ(live_bytes(), before + 4);
    EXPECT_EQ(values_of(y), std::vector<double>{10000.0 * 9999 + 50000});
  }
  EXPECT_EQ(live_bytes(), before);
}

TEST_F(GraphHost, RefusalsEndTheCapture) {
  auto x = on_quartz({1, 2});
  HostGraph graph(false);
  QUARTZ_EXPECT_ERROR(c10::Error, "aten::item reads a value", captured(graph, [&] {
                        x.add_(1);
                        return x[0].item<float>();
                      }));
  EXPECT_FALSE(capturing_on_host());
  EXPECT_EQ(values_of(x), (std::vector<double>{1, 2}));
  QUARTZ_EXPECT_ERROR(c10::Error, "the capture was ended by an error", graph.capture_end());
  QUARTZ_EXPECT_ERROR(c10::Error, "nothing was captured", graph.replay());
  QUARTZ_EXPECT_ERROR(c10::Error, "other than the default one", graph.capture_begin({0, 0}, CaptureMode::kStrict));
  EXPECT_EQ(values_of(captured(graph, [&] { return x.mul(3); })), (std::vector<double>{3, 6}));
}

TEST_F(GraphHost, AGraphThatIsDroppedEndsItsCapture) {
  auto x = on_quartz({1, 2});
  const c10::StreamGuard stream(side_stream());
  auto graph = std::make_unique<HostGraph>(false);
  graph->capture_begin({0, 0}, CaptureMode::kStrict);
  x.add_(1);
  EXPECT_TRUE(capturing_on_host());
  std::thread([&] { graph.reset(); }).join();  // in another thread, even
  EXPECT_FALSE(capturing_on_host());
  EXPECT_EQ(values_of(x), (std::vector<double>{1, 2}));
  EXPECT_TRUE(still_works());
}

TEST_F(GraphHost, WaitingIsRefusedAsOnCuda) {
  HostGraph graph(false);
  QUARTZ_EXPECT_ERROR(c10::Error, "waits on the host", captured(graph, [] {
                        substrate().guard().synchronizeDevice(0);
                        return 0;
                      }));
  graph.reset();
  const c10::StreamGuard stream(side_stream());
  graph.capture_begin({0, 0}, CaptureMode::kRelaxed);
  substrate().guard().synchronizeEvent(nullptr);
  graph.capture_end();
}

TEST_F(GraphHost, DumpsItsCalls) {
  const auto x = on_quartz({1, 2});
  HostGraph graph(false);
  captured(graph, [&] { return x.mul(3).add_(1); });
  const auto path = std::filesystem::temp_directory_path() / ("quartz_graph_" + std::to_string(::getpid()) + ".dot");
  graph.debug_dump(path.string());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  EXPECT_TRUE(contains(text.str(), "0: aten::mul.Tensor"));
  EXPECT_TRUE(contains(text.str(), "c0 -> c1"));
  QUARTZ_EXPECT_ERROR(c10::Error, "cannot write", graph.debug_dump("/nowhere/graph.dot"));
}

}  // namespace
}  // namespace quartz::test
