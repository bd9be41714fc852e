// What the fallback does with memory: in-place operators, out=, views, results that share memory, operators that resize
// or exchange the storage of an argument, and operators that fail half-way.
#include <ATen/ops/empty.h>

#include "aten/alias.h"
#include "common.h"
#include "operators.h"
#include "runtime/allocator.h"

namespace quartz::test {
namespace {

using Numbers = std::vector<double>;

const c10::Device kFirst(kQuartz, 0);

bool share_storage(const at::Tensor& a, const at::Tensor& b) { return a.storage().is_alias_of(b.storage()); }

int64_t live_bytes() { return allocator().getDeviceStats(0).allocated_bytes[0].current; }

// The quartz storage shows its twin's pointer and size.
void expect_in_step(const at::Tensor& tensor) {
  const auto& storage = *tensor.storage().unsafeGetStorageImpl();
  const auto* twin = twin_of(storage);
  ASSERT_NE(twin, nullptr);
  EXPECT_EQ(storage.data(), twin->data());
  EXPECT_EQ(storage.nbytes(), twin->nbytes());
}

class FallbackMemory : public ::testing::Test {
 protected:
  at::Tensor x = on_quartz({1, 2, 3}), y = on_quartz({10, 20, 30, 40});
};

TEST_F(FallbackMemory, InPlaceReturnsTheArgument) {
  const auto* pointer = x.const_data_ptr();
  EXPECT_TRUE(call_one("add_one_", x).is_same(x));
  EXPECT_EQ(values_of(x), (Numbers{2, 3, 4}));
  EXPECT_EQ(x.const_data_ptr(), pointer);
}

TEST_F(FallbackMemory, InPlaceOnAViewWritesTheBase) {
  const auto view = y.slice(0, 1, 4, 2);
  EXPECT_TRUE(call_one("add_one_", view).is_same(view));
  EXPECT_EQ(values_of(y), (Numbers{10, 21, 30, 41}));
}

TEST_F(FallbackMemory, InPlaceOnAListAndOnTheSameTensorTwice) {
  call("add_one_to_all_", c10::List<at::Tensor>({x, y, x}));
  EXPECT_EQ(values_of(x), (Numbers{3, 4, 5}));
  EXPECT_EQ(values_of(y), (Numbers{11, 21, 31, 41}));
}

TEST_F(FallbackMemory, OutIsResizedAndReturned) {
  auto out = at::empty({0}, quartz_options());
  const auto view = out.view({0, 1});
  EXPECT_TRUE(call_one("repeated_out", x, 2, out).is_same(out));
  EXPECT_EQ(out.sizes(), (at::IntArrayRef{6}));
  EXPECT_EQ(values_of(out), (Numbers{1, 2, 3, 1, 2, 3}));
  expect_in_step(out);
  EXPECT_TRUE(share_storage(out, view));
  EXPECT_TRUE(call_one("repeated_out", x, 1, out).is_same(out));  // smaller: the storage stays
  EXPECT_EQ(values_of(out), (Numbers{1, 2, 3}));
  EXPECT_EQ(out.storage().nbytes(), 24u);
}

TEST_F(FallbackMemory, OutThatIsAnInput) {
  EXPECT_TRUE(call_one("repeated_out", x, 1, x).is_same(x));
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
  EXPECT_TRUE(call_one("repeated_out", x, 200, x).is_same(x));
  EXPECT_EQ(x.numel(), 600);
  EXPECT_EQ(values_of(x.slice(0, 597)), (Numbers{1, 2, 3}));
  expect_in_step(x);
}

TEST_F(FallbackMemory, ViewsShareTheArgumentsStorage) {
  const auto before = live_bytes();
  const auto tail = call_one("tail", y);
  EXPECT_EQ(live_bytes(), before);
  EXPECT_TRUE(share_storage(tail, y));
  EXPECT_EQ(tail.storage_offset(), 1);
  EXPECT_EQ(values_of(tail), (Numbers{20, 30, 40}));
  const auto halves = call("halves", y).at(0).toTensorVector();
  ASSERT_EQ(halves.size(), 2u);
  EXPECT_TRUE(share_storage(halves[0], y) && share_storage(halves[1], y));
  halves[1].fill_(0);
  EXPECT_EQ(values_of(tail), (Numbers{20, 0, 0}));
}

TEST_F(FallbackMemory, AViewKeepsTheMemory) {
  const auto before = live_bytes();
  auto big = at::empty({1024}, quartz_options()).fill_(4);
  auto tail = call_one("tail", big);
  big = at::Tensor();
  EXPECT_EQ(live_bytes(), before + 4096);
  EXPECT_EQ(values_of(tail), Numbers(1023, 4.));
  tail = at::Tensor();
  EXPECT_EQ(live_bytes(), before);
}

TEST_F(FallbackMemory, AnInputHandedBackIsTheInput) {
  EXPECT_TRUE(call_one("same", x).is_same(x));
  EXPECT_TRUE(call_one("second", x, y).is_same(y));
}

TEST_F(FallbackMemory, ResultsThatShareMemoryShareAStorage) {
  const auto before = live_bytes();
  const auto results = call("two_views", at::empty({128}, quartz_options()).fill_(1));
  const auto first = results[0].toTensor(), second = results[1].toTensor();
  EXPECT_TRUE(share_storage(first, second));
  EXPECT_EQ(live_bytes(), before + 512);  // one block, counted once
  first.fill_(9);
  EXPECT_EQ(values_of(second)[0], 9);
  EXPECT_EQ(values_of(second)[1], 2);
}

TEST_F(FallbackMemory, AResultReturnedTwiceHasOneStorage) {
  const auto results = call("one_twice", x);
  const auto first = results[0].toTensor(), second = results[1].toTensor();
  EXPECT_TRUE(share_storage(first, second));
  first.resize_({1000}).fill_(3);
  EXPECT_EQ(values_of(second), (Numbers{3, 3, 3}));
}

TEST_F(FallbackMemory, SetToAnotherArgumentsMemory) {
  EXPECT_TRUE(call_one("set_to_", x, y).is_same(x));
  EXPECT_TRUE(share_storage(x, y));
  EXPECT_EQ(values_of(x), (Numbers{10, 20, 30, 40}));
  x.add_(1);
  EXPECT_EQ(values_of(y), (Numbers{11, 21, 31, 41}));
}

TEST_F(FallbackMemory, SetToNewMemory) {
  const auto view = x.slice(0, 1);
  const auto before = live_bytes();
  EXPECT_TRUE(call_one("set_to_new_", x).is_same(x));
  EXPECT_EQ(values_of(x), (Numbers{1, 1, 1, 1, 1}));
  EXPECT_EQ(x.device(), kFirst);
  EXPECT_FALSE(share_storage(x, view));
  EXPECT_EQ(values_of(view), (Numbers{2, 3}));  // the old memory lives on
  EXPECT_GT(live_bytes(), before);
  expect_in_step(x);
}

TEST_F(FallbackMemory, TwoArgumentsExchangeTheirMemory) {
  const auto x_view = x.slice(0, 0, 1), y_view = y.slice(0, 0, 1);
  const auto results = call("exchange_", x, y);
  EXPECT_TRUE(results[0].toTensor().is_same(x));
  EXPECT_TRUE(results[1].toTensor().is_same(y));
  EXPECT_EQ(values_of(x), (Numbers{10, 20, 30, 40}));
  EXPECT_EQ(values_of(y), (Numbers{1, 2, 3}));
  x.fill_(7);
  y.fill_(8);
  EXPECT_EQ(values_of(x_view), Numbers{8});
  EXPECT_EQ(values_of(y_view), Numbers{7});
}

TEST_F(FallbackMemory, AFailureAfterAResizeLeavesAUsableTensor) {
  const auto view = x.slice(0, 0, 2);
  const auto before = live_bytes();
  QUARTZ_EXPECT_ERROR(c10::IndexError, "failed after the resize", call("resize_and_fail_", x, 100000));
  expect_in_step(x);
  EXPECT_EQ(x.sizes(), (at::IntArrayRef{3}));            // only the room behind it has grown
  const int64_t unit = substrate().is_cuda() ? 512 : 1;  // CUDA's allocator counts blocks of 512 bytes
  const auto counted = [unit](std::size_t bytes) { return (static_cast<int64_t>(bytes) + unit - 1) / unit * unit; };
  EXPECT_EQ(live_bytes() - before, counted(x.storage().nbytes()) - counted(12));
  EXPECT_EQ(values_of(view), (Numbers{1, 2}));
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
  EXPECT_TRUE(still_works());
  x = at::Tensor();
  EXPECT_EQ(values_of(view), (Numbers{1, 2}));
}

TEST_F(FallbackMemory, InPlaceIsSeenByAutograd) {
  // A tensor that backward needs was changed by an operator that declares it: an error, not wrong gradients.
  const auto version = x._version();
  call("add_one_", x);
  EXPECT_GT(x._version(), version);
  const auto list_version = y._version();
  call("add_one_to_all_", c10::List<at::Tensor>({y}));
  EXPECT_GT(y._version(), list_version);
  auto weight = on_quartz({1, 2, 3}).requires_grad_();
  const auto product = weight.mul(x);  // saves x
  call("add_one_", x);
  QUARTZ_EXPECT_ERROR(c10::Error, "modified by an inplace operation", product.sum().backward());
  EXPECT_TRUE(still_works());
}

TEST_F(FallbackMemory, ReadingLeavesTheVersion) {
  const auto version = x._version();
  call("twice", x);
  call("tail", x);
  EXPECT_EQ(x._version(), version);
}

TEST_F(FallbackMemory, ConjugateBitFollowsTheKernel) {
  auto z = x.to(at::kComplexFloat);
  call("conjugate_", z);
  EXPECT_TRUE(z.is_conj());
}

}  // namespace
}  // namespace quartz::test
