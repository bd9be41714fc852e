// How the fallback maps arguments and results of every kind. The operators are those of operators.cpp; every expected
// number is computed here.
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "aten/alias.h"
#include "aten/fallback.h"
#include "aten/op_counts.h"
#include "common.h"
#include "operators.h"
#include "runtime/generator.h"
#include "runtime/guard.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using Numbers = std::vector<double>;
using Names = std::vector<std::string>;

const c10::Device kFirst(kQuartz, 0);

std::string native_name() { return substrate().is_cuda() ? "cuda" : "cpu"; }

class FallbackArguments : public ::testing::Test {
 protected:
  void SetUp() override { seen().clear(); }
  at::Tensor x = on_quartz({1, 2, 3}), y = on_quartz({10, 20, 30});
};

TEST_F(FallbackArguments, Tensor) {
  const auto result = call_one("twice", x);
  EXPECT_EQ(result.device(), kFirst);
  EXPECT_EQ(values_of(result), (Numbers{2, 4, 6}));
  EXPECT_EQ(seen(), Names{native_name()});
  EXPECT_NE(twin_of(*result.storage().unsafeGetStorageImpl()), nullptr);
}

TEST_F(FallbackArguments, CpuTensorsAloneDoNotComeHere) {
  reset_op_counts();
  if (substrate().is_cuda()) return;  // the kernels of these tests would refuse them
  EXPECT_TRUE(call_one("twice", on_cpu({1})).is_cpu());
  EXPECT_EQ(op_counts().count("quartz_test::twice"), 0u);
}

TEST_F(FallbackArguments, OptionalTensor) {
  EXPECT_EQ(values_of(call_one("plus_optional", x, y)), (Numbers{11, 22, 33}));
  EXPECT_EQ(values_of(call_one("plus_optional", x, c10::IValue())), (Numbers{1, 2, 3}));
  EXPECT_EQ(seen().at(2), "none");
  EXPECT_EQ(values_of(call_one("plus_optional", x, at::Tensor())), (Numbers{1, 2, 3}));
}

TEST_F(FallbackArguments, ListOfTensors) {
  EXPECT_EQ(values_of(call_one("sum_list", c10::List<at::Tensor>({x, y, x}))), (Numbers{12, 24, 36}));
  EXPECT_EQ(values_of(call_one("sum_list", c10::List<at::Tensor>({at::Tensor(), y}))), (Numbers{10, 20, 30}));
  EXPECT_EQ(seen(), (Names{native_name(), native_name(), native_name(), "undefined", native_name()}));
}

TEST_F(FallbackArguments, ListOfOptionalTensors) {
  c10::List<std::optional<at::Tensor>> list;
  list.push_back(std::nullopt);
  list.push_back(x);
  list.push_back(y);
  EXPECT_EQ(values_of(call_one("sum_optional_list", list)), (Numbers{11, 22, 33}));
  EXPECT_EQ(seen(), (Names{"none", native_name(), native_name()}));
}

TEST_F(FallbackArguments, ListsOfLists) {
  c10::List<c10::List<at::Tensor>> lists;
  lists.push_back(c10::List<at::Tensor>({x}));
  lists.push_back(c10::List<at::Tensor>());
  lists.push_back(c10::List<at::Tensor>({y, y}));
  const auto result = call_one("sum_lists", x, lists);
  EXPECT_EQ(result.device(), kFirst);
  EXPECT_EQ(values_of(result), (Numbers{22, 44, 66}));
}

TEST_F(FallbackArguments, Dictionary) {
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("a", x);
  dict.insert("b", y);
  const auto result = call_one("sum_dict", x, dict);
  EXPECT_EQ(result.device(), kFirst);
  EXPECT_EQ(values_of(result), (Numbers{12, 24, 36}));
  EXPECT_TRUE(dict.at("a").is_same(x));  // the caller's dictionary is his
}

TEST_F(FallbackArguments, TupleAndAny) {
  const auto tuple = std::make_tuple(x, std::make_tuple(y, int64_t{5}));
  EXPECT_EQ(values_of(call_one("sum_tuple", x, tuple)), (Numbers{12, 24, 36}));
  // The dispatcher does not look into `Any`: a call that names quartz nowhere else is given to the kernel's key by
  // hand.
  Stack stack{c10::IValue(tuple)};
  const auto op = find_operator("quartz_test::sum_any");
  op.callBoxedForDispatchKey(c10::DispatchKey::PrivateUse1, stack);
  EXPECT_EQ(stack.at(0).toTensor().device(), kFirst);
  EXPECT_EQ(values_of(stack.at(0).toTensor()), (Numbers{11, 22, 33}));
}

TEST_F(FallbackArguments, NestedResults) {
  const auto results = call("make_nested", x);
  ASSERT_EQ(results.size(), 3u);
  const auto dict = results[0].toGenericDict();
  const auto same = dict.at("same").toTensor(), twice = dict.at("twice").toTensor();
  EXPECT_TRUE(same.is_same(x));
  EXPECT_EQ(twice.device(), kFirst);
  EXPECT_EQ(values_of(twice), (Numbers{2, 4, 6}));
  const auto& outer = results[1].toTupleRef();
  EXPECT_EQ(outer.elements()[1].toInt(), 7);
  const auto& inner = outer.elements()[0].toTupleRef();
  EXPECT_TRUE(inner.elements()[0].toTensor().is_same(x));
  EXPECT_EQ(values_of(inner.elements()[1].toTensor()), (Numbers{2, 4, 6}));
  const auto lists = results[2].toList();
  const c10::IValue second = lists.get(1);
  EXPECT_EQ(values_of(second.toTensorVector().at(1)), (Numbers{3, 6, 9}));
  EXPECT_EQ(second.toTensorVector().at(0).device(), kFirst);
}

TEST_F(FallbackArguments, Device) {
  EXPECT_TRUE(call_one("moved", x, c10::IValue()).is_same(x));
  const auto same = call_one("moved", x, kFirst);
  EXPECT_TRUE(same.is_same(x));
  const auto current = call_one("moved", x, c10::Device(kQuartz));
  EXPECT_EQ(current.device(), kFirst);
  EXPECT_EQ(seen(), (Names{"none", substrate().native_device(0).str(), substrate().native_device(0).str()}));
}

TEST_F(FallbackArguments, DeviceCpuGivesMemoryOfItsOwn) {
  const auto cpu = call_one("moved", x, c10::Device("cpu"));
  EXPECT_TRUE(cpu.is_cpu());
  EXPECT_EQ(values_of(cpu), (Numbers{1, 2, 3}));
  x.fill_(9);
  EXPECT_EQ(values_of(cpu), (Numbers{1, 2, 3}));
  EXPECT_EQ(seen(), Names{"cpu"});
}

TEST_F(FallbackArguments, DeviceUnknown) {
  QUARTZ_EXPECT_ERROR(c10::Error, "invalid device ordinal", call("moved", x, c10::Device(kQuartz, device_count())));
  EXPECT_TRUE(seen().empty());
}

TEST_F(FallbackArguments, DeviceIsTheOnlyOneToNameQuartz) {
  Stack stack{c10::IValue(kFirst)};
  find_operator("quartz_test::ones_on").callBoxedForDispatchKey(c10::DispatchKey::PrivateUse1, stack);
  EXPECT_EQ(seen(), Names{substrate().native_device(0).str()});
  EXPECT_EQ(stack.at(0).toTensor().device(), kFirst);
  EXPECT_EQ(values_of(stack.at(0).toTensor()), (Numbers{1, 1}));
}

TEST_F(FallbackArguments, Generator) {
  auto ours = new_generator(0);
  ours.set_current_seed(4);
  auto native = substrate().new_native_generator(0);
  native.set_current_seed(4);
  EXPECT_EQ(values_of(call_one("noise", x, ours)), values_of(native_alias(x).clone().uniform_(0, 1, native)));
  EXPECT_EQ(seen().at(0), native.device().str());
  // Without one, the default generator of the tensor's device.
  auto generator = default_generator(0);
  generator.set_current_seed(4);
  native.set_current_seed(4);
  EXPECT_EQ(values_of(call_one("noise", x, c10::IValue())), values_of(native_alias(x).clone().uniform_(0, 1, native)));
  auto cpu = at::globalContext().defaultGenerator(c10::Device("cpu"));
  seen().clear();
  QUARTZ_EXPECT_ERROR(c10::Error, "Expected a 'quartz:0' device type for generator but found 'cpu'",
                      call("noise", x, cpu));
  EXPECT_TRUE(seen().empty());
}

TEST_F(FallbackArguments, Storage) {
  const auto result = call_one("of_storage", x, y.storage());
  EXPECT_EQ(seen().at(0), substrate().native_device(0).str());
  EXPECT_EQ(result.device(), kFirst);
  EXPECT_EQ(values_of(result), (Numbers{10, 20, 30}));
  EXPECT_EQ(result.const_data_ptr(), y.const_data_ptr());
  // One block of memory has one quartz storage: a resize through either is seen by both.
  EXPECT_TRUE(result.storage().is_alias_of(y.storage()));
  y.resize_({1000}).fill_(5);
  EXPECT_EQ(values_of(result), (Numbers{5, 5, 5}));
}

TEST_F(FallbackArguments, Stream) {
  const c10::impl::VirtualGuardImpl guard(kQuartz);
  const auto stream = guard.getStream(kFirst);
  EXPECT_EQ(values_of(call_one("on_stream", x, stream)), (Numbers{1, 2, 3}));
  EXPECT_EQ(seen().at(0), substrate().is_cuda() ? "cuda" : "quartz");
}

TEST_F(FallbackArguments, TheSameTensorTwiceIsOneAlias) {
  EXPECT_EQ(values_of(call_one("plus_optional", x, x)), (Numbers{2, 4, 6}));
  EXPECT_TRUE(call_one("second", x, x).is_same(x));
  call("set_to_", x, x);
  EXPECT_EQ(values_of(x), (Numbers{1, 2, 3}));
}

TEST_F(FallbackArguments, UndefinedTensorsPassThrough) {
  EXPECT_FALSE(call_one("nothing", x).defined());
  const auto results = call("second", x, at::Tensor());
  EXPECT_FALSE(results[0].toTensor().defined());
}

TEST_F(FallbackArguments, ScalarTensorOfTheCpuIsAScalar) {
  auto scalar = on_cpu({5}).squeeze();
  ASSERT_EQ(scalar.dim(), 0);
  EXPECT_EQ(values_of(x.add(scalar)), (Numbers{6, 7, 8}));
  EXPECT_EQ(x.add(scalar).device(), kFirst);
}

TEST_F(FallbackArguments, CpuOperandIsRefusedByName) {
  const auto cpu = on_cpu({1, 2, 3});
  const std::string both =
      "Expected all tensors to be on the same device, but found at least two devices, quartz:0 and cpu!";
  QUARTZ_EXPECT_ERROR(c10::Error, both + " (operator quartz_test::plus_optional, argument 'y'",
                      call("plus_optional", x, cpu));
  QUARTZ_EXPECT_ERROR(c10::Error, "operator quartz_test::plus_optional, argument 'x'", call("plus_optional", cpu, x));
  QUARTZ_EXPECT_ERROR(c10::Error, "operator quartz_test::sum_list, argument 'xs'",
                      call("sum_list", c10::List<at::Tensor>({x, cpu})));
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("a", x);
  dict.insert("b", cpu);
  QUARTZ_EXPECT_ERROR(c10::Error, "operator quartz_test::sum_dict, argument 'xs'", call("sum_dict", x, dict));
  QUARTZ_EXPECT_ERROR(c10::Error, "operator quartz_test::repeated_out, argument 'out'",
                      call("repeated_out", x, 1, cpu));
  QUARTZ_EXPECT_ERROR(c10::Error,
                      "operator aten::add.Tensor, argument 'other': move the CPU tensor with .to(\"quartz:0\")",
                      x.add(cpu));
  EXPECT_TRUE(seen().empty());  // no kernel ran
  EXPECT_EQ(values_of(cpu), (Numbers{1, 2, 3}));
  EXPECT_TRUE(still_works());
}

TEST(Facts, AreReadFromTheSchema) {
  const OpFacts facts(find_operator("quartz_test::repeated_out").schema());
  EXPECT_EQ(facts.argument_count, 3u);
  EXPECT_EQ(facts.return_count, 1u);
  ASSERT_EQ(facts.arguments.size(), 2u);  // the integer needs no mapping
  EXPECT_EQ(facts.arguments[0].index, 0u);
  EXPECT_FALSE(facts.arguments[0].written);
  EXPECT_EQ(facts.arguments[1].index, 2u);
  EXPECT_TRUE(facts.arguments[1].written);
  EXPECT_EQ(facts.argument_names, (Names{"x", "count", "out"}));
  EXPECT_EQ(facts.returned_argument[0], 2);
  const OpFacts exchange(find_operator("quartz_test::exchange_").schema());
  EXPECT_EQ(exchange.returned_argument[0], 0);
  EXPECT_EQ(exchange.returned_argument[1], 1);
  EXPECT_EQ(OpFacts(find_operator("quartz_test::twice").schema()).returned_argument[0], -1);
}

}  // namespace
}  // namespace quartz::test
