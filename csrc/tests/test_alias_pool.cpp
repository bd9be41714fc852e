// Aliases are used again by the next call: each time as good as new, and never while somebody else holds them.
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/imag.h>
#include <c10/core/InferenceMode.h>

#include <thread>

#include "aten/alias.h"
#include "aten/alias_pool.h"
#include "common.h"
#include "runtime/allocator.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using at::Tensor;

// The identity of the object that a scope makes for the tensor, and what `use` does with it meanwhile.
template <class Use>
const c10::TensorImpl* through_a_scope(const Tensor& tensor, Operand operand, const Use& use) {
  AliasScope scope;
  const auto alias = scope.borrow_native(tensor, operand);
  use(*alias);
  return (*alias).unsafeGetTensorImpl();
}
const c10::TensorImpl* through_a_scope(const Tensor& tensor, Operand operand = Operand::kRead) {
  return through_a_scope(tensor, operand, [](const Tensor&) {});
}

// Everything a new alias of `tensor` has, compared with native_alias, which makes one from nothing.
void expect_as_new(const Tensor& tensor) {
  const auto expected = native_alias(tensor);
  through_a_scope(tensor, Operand::kRead, [&](const Tensor& alias) {
    EXPECT_EQ(alias.key_set(), expected.key_set());
    EXPECT_EQ(alias.device(), expected.device());
    EXPECT_EQ(alias.dtype(), expected.dtype());
    EXPECT_EQ(alias.sizes(), expected.sizes());
    EXPECT_EQ(alias.strides(), expected.strides());
    EXPECT_EQ(alias.storage_offset(), expected.storage_offset());
    EXPECT_EQ(alias.numel(), expected.numel());
    EXPECT_EQ(alias.storage().unsafeGetStorageImpl(), expected.storage().unsafeGetStorageImpl());
    for (auto format :
         {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast, at::MemoryFormat::ChannelsLast3d}) {
      EXPECT_EQ(alias.is_contiguous(format), expected.is_contiguous(format));
    }
    EXPECT_EQ(alias.is_non_overlapping_and_dense(), expected.is_non_overlapping_and_dense());
    EXPECT_EQ(alias.is_conj(), expected.is_conj());
    EXPECT_EQ(alias.is_neg(), expected.is_neg());
    EXPECT_EQ(alias.is_inference(), expected.is_inference());
    EXPECT_EQ(alias.unsafeGetTensorImpl()->is_wrapped_number(), expected.unsafeGetTensorImpl()->is_wrapped_number());
    EXPECT_FALSE(alias.requires_grad());
    EXPECT_FALSE(alias.unsafeGetTensorImpl()->version_counter().enabled());
    EXPECT_TRUE(alias.unsafeGetTensorImpl()->allow_tensor_metadata_change());
  });
}

std::vector<Tensor> all_kinds() {
  const auto options = quartz_options();
  const auto wrapped = on_quartz({2}).select(0, 0);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  const auto complex = at::empty({2, 3}, options.dtype(at::kComplexFloat));
  return {on_quartz({1, 2, 3}),
          at::empty({2, 3, 4, 5}, options.memory_format(at::MemoryFormat::ChannelsLast)),
          at::empty({2, 3, 4, 5, 6}, options).permute({4, 3, 2, 1, 0}),
          at::empty({1, 2, 1, 2, 1, 2, 1, 2}, options),
          at::empty({0, 3}, options.dtype(at::kLong)),
          on_quartz(iota(12)).view({3, 4}).select(0, 1).slice(0, 1, 4, 2),
          on_quartz({1}).expand({5, 5}),
          complex.conj().t(),
          at::imag(complex.conj()),  // neg
          wrapped};
}

TEST(AliasPool, AnyKindAfterAnyOtherIsAsNew) {
  const auto tensors = all_kinds();
  for (const auto& first : tensors) {
    for (const auto& second : tensors) {
      const auto* before = through_a_scope(first);
      ASSERT_GE(kept_aliases(), 1);
      EXPECT_EQ(through_a_scope(second), before) << "not used again";
      expect_as_new(second);
    }
  }
}

TEST(AliasPool, WhatAKernelDidToAnAliasIsGone) {
  const auto x = on_quartz({1, 2, 3, 4});
  through_a_scope(x, Operand::kRead, [](const Tensor& alias) {
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(at::IntArrayRef({2, 2}), at::IntArrayRef({1, 2}), 0);
    impl->set_storage_keep_dtype(at::empty({9}, native_options()).storage());
    impl->_set_neg(true);
  });
  expect_as_new(x);
  through_a_scope(x, Operand::kRead, [](const Tensor& alias) {
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(), at::IntArrayRef(), 1);
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  });
  expect_as_new(x);
  through_a_scope(x, Operand::kRead,
                  [](const Tensor& alias) { alias.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(false); });
  expect_as_new(x);
  // Written: with the version counter of the argument, and autograd's data if a kernel asks for it.
  through_a_scope(x, Operand::kWritten, [&](const Tensor& alias) {
    EXPECT_FALSE(alias.is_inference());
    alias.unsafeGetTensorImpl()->bump_version();
    EXPECT_EQ(x._version(), alias._version());
    alias.set_requires_grad(true);
  });
  const auto version = x._version();
  expect_as_new(x);
  through_a_scope(x, Operand::kWritten, [&](const Tensor& alias) { EXPECT_FALSE(alias.requires_grad()); });
  const auto other = on_quartz({5});
  through_a_scope(other, Operand::kWritten, [](const Tensor& alias) { alias.unsafeGetTensorImpl()->bump_version(); });
  EXPECT_EQ(x._version(), version);
}

TEST(AliasPool, KeptAliasesHoldNoMemory) {
  const auto before = allocator().getDeviceStats(0).allocated_bytes[0].current;
  {
    const auto x = at::empty({1000}, quartz_options());
    through_a_scope(x);
    through_a_scope(x, Operand::kWritten);
    EXPECT_EQ(native_storage(*x.storage().unsafeGetStorageImpl()).use_count(), 2);  // the tensor's and this one
  }
  EXPECT_EQ(allocator().getDeviceStats(0).allocated_bytes[0].current, before);
}

TEST(AliasPool, AnAliasThatAKernelKeepsIsLeftAlone) {
  const auto x = on_quartz({1, 2, 3}), y = on_quartz({7});
  Tensor strong;
  const auto* first = through_a_scope(x, Operand::kRead, [&](const Tensor& alias) { strong = alias; });
  EXPECT_NE(through_a_scope(y), first);
  EXPECT_EQ(values_of(strong), (std::vector<double>{1, 2, 3}));

  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(strong.getIntrusivePtr());
  const auto* second = through_a_scope(x, Operand::kRead, [&](const Tensor& alias) { weak = alias.getIntrusivePtr(); });
  EXPECT_TRUE(weak.expired());
  EXPECT_NE(through_a_scope(y), second);  // its memory is still taken by the weak reference
}

TEST(AliasPool, ManyOperandsAndNestedScopes) {
  std::vector<Tensor> tensors;
  std::vector<double> expected;
  for (int i = 0; i < 100; ++i) {
    tensors.push_back(on_quartz({static_cast<float>(i)}));
    expected.push_back(i);
  }
  for (int round = 0; round < 3; ++round) EXPECT_EQ(values_of(at::cat(tensors)), expected);
  EXPECT_LE(kept_aliases(), 16);
  AliasScope outer;
  const auto alias = outer.to_native(tensors[3]);
  EXPECT_EQ(values_of(at::cat(tensors)), expected);
  EXPECT_EQ(alias.data_ptr(), tensors[3].data_ptr());
}

TEST(AliasPool, InferenceTensorsAndErrors) {
  const c10::InferenceMode inference;
  const auto x = on_quartz({1, 2}), y = on_quartz({1, 2, 3});
  ASSERT_TRUE(x.is_inference());
  expect_as_new(x);
  x.add_(x);
  EXPECT_EQ(values_of(x), (std::vector<double>{2, 4}));
  EXPECT_THROW(x.add(y), c10::Error);
  expect_as_new(x);
  EXPECT_TRUE(x.add(x).is_inference());
}

// Destructors of thread-local objects may run operators, before the pool's own end and after it.
struct AtThreadExit {
  Tensor x;
  std::vector<double>* result;
  ~AtThreadExit() {
    if (x.defined()) *result = values_of(x.add(x));
  }
};

TEST(AliasPool, ThreadsHaveTheirOwnAndEndCleanly) {
  const auto shared = on_quartz({1, 2});
  const bool at_exit = !substrate().is_cuda();  // PyTorch's CUDA streams are thread-local and may be gone by then
  std::vector<std::vector<double>> results(8);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < results.size(); ++i) {
    threads.emplace_back([&, i] {
      EXPECT_EQ(kept_aliases(), 0);
      static thread_local AtThreadExit early, late;
      if (at_exit && i % 2 == 0)
        early = {shared, &results[i]};  // made before the pool is first used: destroyed after its end
      for (int round = 0; round < 200; ++round) EXPECT_EQ(values_of(shared.add(shared)), (std::vector<double>{2, 4}));
      if (at_exit && i % 2 == 1) late = {shared, &results[i]};
    });
  }
  for (auto& thread : threads) thread.join();
  if (!at_exit) return;
  for (const auto& result : results) EXPECT_EQ(result, (std::vector<double>{2, 4}));
}

// An alias that another thread drops last.
TEST(AliasPool, AliasesThatOutliveTheirThread) {
  const auto x = on_quartz({3, 4});
  Tensor kept;
  std::thread([&] { through_a_scope(x, Operand::kRead, [&](const Tensor& alias) { kept = alias; }); }).join();
  EXPECT_EQ(values_of(kept), (std::vector<double>{3, 4}));
  kept.reset();
  EXPECT_TRUE(still_works());
}

}  // namespace
}  // namespace quartz::test
