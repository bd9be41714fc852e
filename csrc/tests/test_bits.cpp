// Conjugate and negative bits, tensors without elements, strides: what an alias must carry over. The reference is the
// same expression on the native device.
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/real.h>
#include <ATen/ops/view_as_real.h>

#include "aten/alias.h"
#include "common.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using Numbers = std::vector<double>;

at::Tensor complex_numbers() { return at::complex(on_quartz({1, 2}), on_quartz({3, -4})); }

Numbers parts(const at::Tensor& z) { return values_of(at::view_as_real(z.cpu().resolve_conj().resolve_neg())); }

TEST(Bits, ConjugateIsAViewAndReachesTheKernel) {
  const auto z = complex_numbers();
  const auto conjugate = z.conj();
  EXPECT_TRUE(conjugate.is_conj());
  EXPECT_EQ(conjugate.const_data_ptr(), z.const_data_ptr());
  const auto alias = native_alias(conjugate);
  EXPECT_TRUE(alias.is_conj());
  EXPECT_EQ(parts(alias), (Numbers{1, -3, 2, 4}));
  EXPECT_EQ(parts(conjugate), (Numbers{1, -3, 2, 4}));
  EXPECT_EQ(parts(conjugate.mul(z)), (Numbers{10, 0, 20, 0}));  // |z|^2
  EXPECT_EQ(parts(conjugate.resolve_conj()), (Numbers{1, -3, 2, 4}));
  EXPECT_FALSE(conjugate.resolve_conj().is_conj());
  EXPECT_EQ(parts(at::mm(conjugate.view({1, 2}), z.view({2, 1}))), (Numbers{30, 0}));
}

TEST(Bits, InPlaceOnAConjugateView) {
  const auto z = complex_numbers();
  z.conj().add_(c10::complex<double>(0, 1));
  EXPECT_EQ(parts(z), (Numbers{1, 2, 2, -5}));  // conj(z) + i  <=>  z - i
}

TEST(Bits, NegativeIsAViewAndReachesTheKernel) {
  const auto z = complex_numbers();
  const auto negative = at::imag(z.conj());
  EXPECT_TRUE(negative.is_neg());
  EXPECT_EQ(negative.storage().data(), z.storage().data());
  EXPECT_TRUE(native_alias(negative).is_neg());
  EXPECT_EQ(values_of(negative), (Numbers{-3, 4}));
  EXPECT_EQ(values_of(negative.add(1)), (Numbers{-2, 5}));
  EXPECT_EQ(values_of(negative.resolve_neg()), (Numbers{-3, 4}));
  negative.mul_(2);
  EXPECT_EQ(values_of(at::imag(z)), (Numbers{6, -8}));
}

TEST(Bits, CopiesBetweenBitsAndDevices) {
  const auto z = complex_numbers();
  auto target = at::empty({2}, z.options());
  target.copy_(z.conj());
  EXPECT_EQ(parts(target), (Numbers{1, -3, 2, 4}));
  target.conj().copy_(z);
  EXPECT_EQ(parts(target), (Numbers{1, -3, 2, 4}));
  const auto cpu = z.conj().cpu();
  EXPECT_EQ(parts(cpu), (Numbers{1, -3, 2, 4}));
  EXPECT_EQ(parts(cpu.conj().to(z.device())), (Numbers{1, 3, 2, -4}));
}

TEST(Bits, WrappedNumbersDoNotPromote) {
  auto x = on_quartz({1, 2}).to(at::kHalf);
  EXPECT_EQ(x.add(1.5).scalar_type(), at::kHalf);
  EXPECT_EQ(x.to(at::kInt).mul(2).scalar_type(), at::kInt);
  auto scalar = on_quartz({1.5}).squeeze();
  scalar.unsafeGetTensorImpl()->set_wrapped_number(true);
  EXPECT_TRUE(native_alias(scalar).unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_EQ(x.add(scalar).scalar_type(), at::kHalf);
  EXPECT_EQ(values_of(x.add(scalar)), (Numbers{2.5, 3.5}));
}

TEST(ZeroSize, EveryKindOfOperator) {
  const auto x = at::empty({0, 3}, quartz_options());
  EXPECT_EQ(x.add(1).sizes(), x.sizes());
  EXPECT_EQ(values_of(x.sum()), Numbers{0});
  EXPECT_EQ(values_of(x.sum(at::IntArrayRef{0})), (Numbers{0, 0, 0}));
  EXPECT_EQ(values_of(at::mm(x.t(), x)), Numbers(9, 0.));
  EXPECT_EQ(at::cat({x, at::ones({2, 3}, quartz_options())}).size(0), 2);
  EXPECT_EQ(x.cpu().sizes(), x.sizes());
  EXPECT_EQ(x.cpu().to(x.device()).sizes(), x.sizes());
  EXPECT_EQ(x.clone().device(), x.device());
  auto y = at::empty({0}, quartz_options());
  y.fill_(1).add_(y);
  EXPECT_EQ(y.numel(), 0);
  EXPECT_THROW(y.max(), c10::Error);
  EXPECT_TRUE(still_works());
}

TEST(ZeroSize, ViewAtTheEndOfAStorage) {
  const auto x = on_quartz({1, 2, 3});
  const auto tail = x.slice(0, 3);
  EXPECT_EQ(tail.numel(), 0);
  EXPECT_EQ(native_alias(tail).storage_offset(), 3);
  EXPECT_EQ(tail.add(1).numel(), 0);
}

TEST(Strides, AliasHasSizesStridesAndOffset) {
  const auto x = on_quartz(iota(24)).view({2, 3, 4});
  for (const auto& view : {x.transpose(0, 2), x.slice(2, 1, 4, 2), x.select(1, 1), x.unsqueeze(0).expand({5, 2, 3, 4}),
                           x.as_strided({2, 2}, {5, 3}, 7)}) {
    const auto alias = native_alias(view);
    EXPECT_EQ(alias.sizes(), view.sizes());
    EXPECT_EQ(alias.strides(), view.strides());
    EXPECT_EQ(alias.storage_offset(), view.storage_offset());
    EXPECT_EQ(alias.const_data_ptr(), view.const_data_ptr());
    EXPECT_EQ(values_of(alias), values_of(view));
  }
  EXPECT_EQ(values_of(x.as_strided({2, 2}, {5, 3}, 7)), (Numbers{7, 10, 12, 15}));
}

TEST(Strides, ResultsKeepTheNativeLayout) {
  const auto x = on_quartz(iota(16)).view({1, 4, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(x.is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_EQ(x.stride(1), 1);
  EXPECT_TRUE(x.mul(2).is_contiguous(at::MemoryFormat::ChannelsLast));
  EXPECT_EQ(values_of(x.mul(2))[15], 30);
  const auto t = on_quartz(iota(6)).view({2, 3}).t();
  EXPECT_EQ(t.exp().strides(), t.strides());
}

TEST(Alias, LeanAndFull) {
  const auto x = on_quartz({1, 2, 3});
  EXPECT_TRUE(native_alias(x).is_inference());
  const auto full = native_alias(x, AliasKind::kFull);
  EXPECT_FALSE(full.is_inference());
  EXPECT_EQ(full.const_data_ptr(), x.const_data_ptr());
  auto gradient_of = full;
  gradient_of.requires_grad_();
  EXPECT_FALSE(x.requires_grad());
}

TEST(Alias, ScopeKeepsIdentityAndDevice) {
  const auto x = on_quartz({1, 2, 3});
  AliasScope scope;
  EXPECT_FALSE(scope.has_device());
  const auto alias = scope.to_native(x);
  EXPECT_TRUE(scope.has_device());
  EXPECT_EQ(scope.device(), x.device());
  EXPECT_TRUE(scope.to_native(x).is_same(alias));
  EXPECT_TRUE(scope.to_quartz(alias).is_same(x));
  EXPECT_TRUE(scope.is_alias_of_argument(alias.narrow(0, 1, 1)));
  EXPECT_FALSE(scope.is_alias_of_argument(alias.clone()));
  EXPECT_FALSE(scope.is_alias_of_argument(at::Tensor()));
  const at::Tensor undefined;
  EXPECT_FALSE(scope.to_native(undefined).defined());
  EXPECT_FALSE(scope.to_quartz(at::Tensor()).defined());
  EXPECT_EQ(scope.misplaced_operand(), nullptr);
  const auto cpu = on_cpu({1, 2});
  EXPECT_TRUE(scope.to_native(cpu, Operand::kIndex).is_same(cpu));
  EXPECT_EQ(scope.misplaced_operand(), nullptr);
  scope.to_native(cpu);
  EXPECT_EQ(scope.misplaced_operand(), cpu.unsafeGetTensorImpl());
  QUARTZ_EXPECT_ERROR(c10::Error, "(operator my::op: move the CPU tensor", scope.check_operands("my::op"));
}

TEST(Alias, SpecialLayoutsAreKnownByTheirKeys) {
  EXPECT_FALSE(has_special_layout(on_quartz({1}).key_set()));
  EXPECT_TRUE(has_special_layout(c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1)));
  EXPECT_TRUE(has_special_layout(c10::DispatchKeySet(c10::DispatchKey::QuantizedPrivateUse1)));
  EXPECT_TRUE(has_special_layout(c10::DispatchKeySet(c10::DispatchKey::NestedTensorPrivateUse1)));
  EXPECT_TRUE(has_special_layout(c10::DispatchKeySet(c10::DispatchKey::ZeroTensor)));
}

}  // namespace
}  // namespace quartz::test
