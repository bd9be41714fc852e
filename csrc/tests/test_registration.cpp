// Operators that come and go at run time, the counters, and what libquartz.so registers at load.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <memory>
#include <thread>

#include "aten/op_counts.h"
#include "aten/registration.h"
#include "common.h"
#include "operators.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using Numbers = std::vector<double>;
using Counts = std::pair<uint64_t, uint64_t>;  // own, fallback

Counts count_of(const std::string& name) {
  const auto counts = op_counts();
  const auto found = counts.find(name);
  return found == counts.end() ? Counts{0, 0} : found->second;
}

// A library with one operator, for as long as the object lives.
template <class Function>
std::unique_ptr<torch::Library> define(const char* schema, const char* name, Function* function) {
  auto library =
      std::make_unique<torch::Library>(torch::Library::FRAGMENT, "quartz_test", std::nullopt, __FILE__, __LINE__);
  library->def(schema);
  library->impl(name, torch::dispatch(substrate().keys().dense, torch::CppFunction(function)));
  return library;
}

at::Tensor negated(const at::Tensor& x) { return x.neg(); }
at::Tensor& increased_(at::Tensor& x, int64_t, int64_t amount) { return x.add_(amount); }

// (..., x) -> x plus the number of arguments.
void add_count_to_last(const c10::OperatorHandle& op, Stack* stack) {
  const auto count = op.schema().arguments().size();
  const at::Tensor last = torch::jit::pop(*stack).toTensor();
  torch::jit::drop(*stack, count - 1);
  torch::jit::push(*stack, last.add(static_cast<int64_t>(count)));
}

TEST(Registration, OperatorsRegisteredLaterWork) {
  const auto x = on_quartz({1, 2});
  const auto library = define("later(Tensor x) -> Tensor", "later", negated);
  EXPECT_EQ(values_of(call_one("later", x)), (Numbers{-1, -2}));
}

TEST(Registration, AnOperatorMayReturnWithAnotherSchema) {
  auto x = on_quartz({1, 2});
  auto library = define("changing(Tensor x) -> Tensor", "changing", negated);
  EXPECT_EQ(values_of(call_one("changing", x)), (Numbers{-1, -2}));
  library.reset();
  EXPECT_FALSE(c10::Dispatcher::singleton().findSchema({"quartz_test::changing", ""}).has_value());
  library = define("changing(Tensor(a!) x, int ignored, int amount) -> Tensor(a!)", "changing", increased_);
  EXPECT_TRUE(call_one("changing", x, 0, 5).is_same(x));
  EXPECT_EQ(values_of(x), (Numbers{6, 7}));
  library.reset();
  library = define("changing(Tensor x) -> Tensor", "changing", negated);
  EXPECT_EQ(values_of(call_one("changing", x)), (Numbers{-6, -7}));
}

TEST(Registration, AKernelRemainsWhileItsDefinitionChanges) {
  // The definition goes, the implementation keeps the dispatcher's entry alive: the place in memory stays the same.
  auto x = on_quartz({1, 2});
  torch::Library boxed(torch::Library::IMPL, "quartz_test", substrate().keys().dense, __FILE__, __LINE__);
  boxed.impl("kept", torch::CppFunction::makeFromBoxedFunction<&add_count_to_last>());
  const auto definition = [](const char* schema) {
    auto library =
        std::make_unique<torch::Library>(torch::Library::FRAGMENT, "quartz_test", std::nullopt, __FILE__, __LINE__);
    library->def(schema);
    return library;
  };
  auto library = definition("kept(Tensor x) -> Tensor");
  EXPECT_EQ(values_of(call_one("kept", x)), (Numbers{2, 3}));
  library.reset();
  library = definition("kept(int a, int b, Tensor x) -> Tensor");
  EXPECT_EQ(values_of(call_one("kept", 1, 2, x)), (Numbers{4, 5}));
}

TEST(Registration, MissingNativeKernelIsAnErrorThatNamesTheOperator) {
  torch::Library library(torch::Library::FRAGMENT, "quartz_test", std::nullopt, __FILE__, __LINE__);
  library.def("kernelless(Tensor x) -> Tensor");
  QUARTZ_EXPECT_ERROR(c10::Error, "quartz_test::kernelless", call("kernelless", on_quartz({1})));
  EXPECT_TRUE(still_works());
}

TEST(Registration, HappensOnce) {
  initialize();
  initialize();
  EXPECT_TRUE(at::isPrivateUse1HooksRegistered());
  const auto& hooks = at::detail::getPrivateUse1Hooks();
  EXPECT_TRUE(hooks.isBuilt());
  EXPECT_TRUE(hooks.isAvailable());
  EXPECT_EQ(hooks.deviceCount(), device_count());
  EXPECT_EQ(hooks.getCurrentDevice(), current_device());
  EXPECT_TRUE(still_works());
  EXPECT_TRUE(hooks.hasPrimaryContext(0));
  EXPECT_FALSE(hooks.hasPrimaryContext(device_count()));
  EXPECT_FALSE(hooks.hasPrimaryContext(-1));
}

TEST(Registration, HooksResizeAStorage) {
  const auto x = on_quartz({1, 2, 3});
  at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(x.storage(), 100);
  EXPECT_EQ(x.storage().nbytes(), 100u);
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
}

TEST(OpCounts, TellOwnKernelsFromTheFallback) {
  const auto x = on_quartz({1, 2, 3});
  reset_op_counts();
  EXPECT_TRUE(op_counts().empty());
  call("twice", x);
  call("twice", x);
  x.view({3, 1});
  x.add(x);
  at::empty({1}, x.options());
  EXPECT_EQ(count_of("quartz_test::twice"), (Counts{0, 2}));
  EXPECT_EQ(count_of("aten::view"), (Counts{1, 0}));
  EXPECT_EQ(count_of("aten::add.Tensor"), (Counts{0, 1}));  // the unboxed fallback counts as one
  EXPECT_EQ(count_of("aten::empty.memory_format"), (Counts{1, 0}));
  EXPECT_EQ(op_counts().size(), 4u);
  reset_op_counts();
  EXPECT_TRUE(op_counts().empty());
  call("twice", x);
  EXPECT_EQ(count_of("quartz_test::twice"), (Counts{0, 1}));
}

TEST(OpCounts, AFailedCallIsACall) {
  reset_op_counts();
  EXPECT_THROW(on_quartz({1, 2}).add(on_quartz({1, 2, 3})), c10::Error);
  EXPECT_EQ(count_of("aten::add.Tensor"), (Counts{0, 1}));
}

TEST(OpCounts, CountersAreOneAName) {
  auto& counter = op_counter("quartz_test::counted");
  EXPECT_EQ(&counter, &op_counter("quartz_test::counted"));
  EXPECT_NE(&counter, &op_counter("quartz_test::other"));
  EXPECT_EQ(counter.name, "quartz_test::counted");
  EXPECT_EQ(full_name({"aten::add", "Tensor"}), "aten::add.Tensor");
  EXPECT_EQ(full_name({"aten::relu", ""}), "aten::relu");
  reset_op_counts();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 10000; ++i) counter.count_own();
      for (int i = 0; i < 500; ++i) op_counter("quartz_test::counted").count_fallback();
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(count_of("quartz_test::counted"), (Counts{40000, 2000}));
}

TEST(Threads, FirstCallsOfAnOperatorAtTheSameTime) {
  // The facts of an operator are read at its first call.
  std::vector<std::thread> threads;
  std::vector<Numbers> results(8);
  const auto library = define("rushed(Tensor x) -> Tensor", "rushed", negated);
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back(
        [&results, t] { results[t] = values_of(call_one("rushed", on_quartz({static_cast<float>(t)}))); });
  }
  for (auto& thread : threads) thread.join();
  for (int t = 0; t < 8; ++t) EXPECT_EQ(results[t], Numbers{-1. * t});
}

}  // namespace
}  // namespace quartz::test
