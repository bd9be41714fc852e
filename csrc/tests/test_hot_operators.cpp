// The unboxed versions of the fallback (hot_operators.cpp) against the boxed one and against the native device: same
// bits, same layout, same errors. Every operator of that file's table has a row here.
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <cmath>

#include <functional>
#include <ostream>

#include "aten/fallback.h"
#include "common.h"
#include "operators.h"
#include "runtime/allocator.h"
#include "runtime/substrate.h"

namespace quartz::test {
namespace {

using at::Tensor;
using c10::IValue;

struct Case {
  const char* op;
  const char* overload;
  Stack arguments;  // on the native device; every call gets copies
};
void PrintTo(const Case& call, std::ostream* out) { *out << call.op << "." << call.overload; }

template <class... Arguments>
Case row(const char* op, const char* overload, Arguments&&... arguments) {
  return {op, overload, Stack{IValue(std::forward<Arguments>(arguments))...}};
}

Tensor native(std::vector<float> values) { return on_cpu(values).to(substrate().native_device(0)); }
Tensor matrix(float first = 1) {  // 3 x 4, a little irregular
  auto values = iota(12);
  for (auto& value : values) value = first + 0.37f * value - 0.011f * value * value;
  return native(values).view({3, 4});
}
Tensor other() { return matrix(-1.3f); }
Tensor transposed() { return matrix(0.4f).view({4, 3}).t(); }
Tensor vec4() { return native({2, -1, 0.5, 3}); }
Tensor indices(std::vector<float> values) { return native(std::move(values)).to(at::kLong); }
Tensor mask() { return other().gt(0); }
Tensor bits() { return indices({1, 6, 12, 255}); }
Tensor batch() { return native(iota(24)).view({2, 3, 4}).mul(0.1); }
c10::List<Tensor> list() { return c10::List<Tensor>({matrix(), vec4(), native({})}); }
c10::List<Tensor> other_list() { return c10::List<Tensor>({other(), vec4().mul(2), native({})}); }
c10::List<std::optional<Tensor>> index_list(std::optional<Tensor> first, std::optional<Tensor> second) {
  c10::List<std::optional<Tensor>> result;
  result.push_back(std::move(first));
  result.push_back(std::move(second));
  return result;
}
IValue none() { return {}; }

const std::vector<int64_t> kLastDim{-1}, kBothDims{0, 1}, kRowShape{4};

Case unary(const char* op) { return row(op, "", transposed()); }
Case binary(const char* op, const char* overload) { return row(op, overload, matrix(), vec4()); }
Case scaled(const char* op) {  // with alpha
  return row(op, "Tensor", matrix(), transposed(), 2);
}
Case with_scalar(const char* op) { return row(op, "Scalar", matrix(), 2.09); }

std::vector<Case> right_cases() {
  return {
      scaled("add"),
      scaled("add_"),
      scaled("sub"),
      scaled("sub_"),
      row("add", "out", matrix(), vec4(), 1, native({}).view({0})),
      binary("mul", "Tensor"),
      binary("mul_", "Tensor"),
      binary("div", "Tensor"),
      binary("div_", "Tensor"),
      unary("neg"),
      unary("exp"),
      unary("rsqrt"),
      unary("sqrt"),
      unary("cos"),
      unary("sin"),
      unary("tanh"),
      unary("sigmoid"),
      unary("silu"),
      unary("relu"),
      unary("zero_"),
      unary("max"),
      unary("any"),
      unary("all"),
      row("gelu", "", matrix(), "tanh"),
      row("pow", "Tensor_Scalar", matrix(), 3),
      row("addcmul", "", matrix(), other(), vec4(), 0.5),
      row("where", "self", mask(), matrix(), vec4()),
      row("clamp", "", matrix(), 1.5, none()),
      row("fill_", "Scalar", transposed(), 7),
      row("masked_fill_", "Scalar", matrix(), mask(), -1),
      binary("eq", "Tensor"),
      binary("lt", "Tensor"),
      binary("le", "Tensor"),
      binary("gt", "Tensor"),
      binary("ge", "Tensor"),
      with_scalar("eq"),
      with_scalar("ne"),
      with_scalar("lt"),
      with_scalar("gt"),
      with_scalar("ge"),
      row("bitwise_and", "Tensor", bits(), indices({3, 3, 8, 16})),
      row("bitwise_or", "Tensor", bits(), indices({3, 3, 8, 16})),
      row("bitwise_not", "", bits()),
      row("isin", "Tensor_Tensor", bits(), indices({6, 7, 255}), false, true),
      row("mm", "", matrix(), transposed().t()),
      row("addmm", "", native({1, 2, 3}), matrix(), transposed().t(), 0.5, 2),
      row("bmm", "", batch(), batch().transpose(1, 2)),
      row("baddbmm", "", native({1}), batch(), batch().transpose(1, 2), 1, 0.25),
      row("mean", "dim", matrix(), kLastDim, true, none()),
      row("sum", "dim_IntList", matrix(), kBothDims, false, static_cast<int64_t>(at::kDouble)),
      row("argmax", "", other(), 1, false),
      row("cumsum", "", matrix(), 0, none()),
      row("_softmax", "", matrix(), 1, false),
      row("native_layer_norm", "", matrix(), kRowShape, vec4(), none(), 1e-5),
      row("cat", "", c10::List<Tensor>({matrix(), other(), native({})}), 1),
      row("embedding", "", matrix(), indices({2, 0, 1, 2}).view({2, 2}), 0, false, false),
      row("index", "Tensor", matrix(), index_list(std::nullopt, indices({3, 0}))),
      row("index", "Tensor", matrix(), index_list(indices({2, 0}), indices({3, 0}))),
      row("index_select", "", matrix(), 1, indices({3, 3, 0})),
      row("gather", "", matrix(), 1, indices({0, 3, 1}).view({3, 1}), false),
      row("arange", "start_out", 1, 9, 2, native({}).view({0})),
      row("_local_scalar_dense", "", native({4.5})),
      row("_foreach_add", "Scalar", list(), 1.5),
      row("_foreach_add", "List", list(), other_list(), 2),
      row("_foreach_add_", "Scalar", list(), 1.5),
      row("_foreach_add_", "List", list(), other_list(), 2),
      row("_foreach_mul", "Scalar", list(), 1.5),
      row("_foreach_mul", "List", list(), other_list()),
      row("_foreach_mul_", "Scalar", list(), 1.5),
      row("_foreach_mul_", "List", list(), other_list()),
  };
}

// The same wrong calls on the native device give the expected text.
std::vector<Case> wrong_cases() {
  return {
      row("add", "Tensor", matrix(), native({1, 2, 3}), 1),
      row("add_", "Tensor", vec4(), matrix(), 1),
      row("add_", "Tensor", bits(), vec4(), 1),
      row("add", "out", matrix(), vec4(), 1, indices({1})),
      row("mul_", "Tensor", vec4(), native({1, 2, 3})),
      row("where", "self", mask(), native({1, 2, 3}), vec4()),
      row("gelu", "", matrix(), "exact"),
      row("clamp", "", matrix(), none(), none()),
      row("masked_fill_", "Scalar", matrix(), vec4(), 1),
      row("bitwise_and", "Tensor", matrix(), bits()),
      row("mm", "", matrix(), matrix()),
      row("mm", "", matrix(), vec4()),
      row("addmm", "", native({1, 2}), matrix(), transposed().t(), 1, 1),
      row("bmm", "", batch(), batch()),
      row("mean", "dim", bits(), kLastDim, false, none()),
      row("sum", "dim_IntList", vec4(), kBothDims, false, none()),
      row("argmax", "", native({}), none(), false),
      row("cumsum", "", matrix(), 2, none()),
      row("_softmax", "", matrix(), 5, false),
      row("native_layer_norm", "", matrix(), std::vector<int64_t>{3}, none(), none(), 1e-5),
      row("cat", "", c10::List<Tensor>({matrix(), vec4()}), 0),
      row("cat", "", c10::List<Tensor>(), 0),
      row("index", "Tensor", matrix(), index_list(vec4(), std::nullopt)),
      row("index_select", "", matrix(), 1, vec4()),
      row("gather", "", matrix(), 1, vec4().view({1, 4}), false),
      row("arange", "start_out", 1, 9, -2, native({})),
      row("_local_scalar_dense", "", native({})),
      row("_foreach_add", "List", list(), c10::List<Tensor>({vec4()}), 1),
      row("_foreach_mul_", "List", list(), c10::List<Tensor>()),
  };
}

c10::OperatorHandle handle(const Case& call) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("aten::") + call.op).c_str(), call.overload);
}

template <class Map>
IValue map_tensors(const IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<Tensor>(map(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

Stack copies(const Stack& arguments) {
  Stack result;
  for (const auto& value : arguments) result.push_back(map_tensors(value, [](const Tensor& x) { return x.clone(); }));
  return result;
}

Tensor to_quartz(const Tensor& tensor) {  // with its strides
  return tensor.to(c10::Device(kQuartz, 0));
}
Stack on_device(const Stack& arguments) {
  Stack result;
  for (const auto& value : arguments) result.push_back(map_tensors(value, to_quartz));
  return result;
}

std::vector<Tensor> tensors_of(const Stack& values) {
  std::vector<Tensor> all;
  for (const auto& value : values) {
    map_tensors(value, [&](const Tensor& tensor) {
      all.push_back(tensor);
      return tensor;
    });
  }
  return all;
}

// `close`: an own kernel computed, in an order of its own.
void expect_same(const Stack& actual, const Stack& expected, c10::Device device, bool close = false) {
  ASSERT_EQ(actual.size(), expected.size());
  const auto a = tensors_of(actual), b = tensors_of(expected);
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(a[i].device(), device);
    EXPECT_EQ(a[i].scalar_type(), b[i].scalar_type());
    EXPECT_EQ(a[i].sizes(), b[i].sizes());
    EXPECT_EQ(a[i].strides(), b[i].strides());
    const auto values = values_of(a[i]), wanted = values_of(b[i]);
    if (!close) {
      EXPECT_EQ(values, wanted);
    }
    for (std::size_t j = 0; close && j < values.size() && j < wanted.size(); ++j) {
      EXPECT_NEAR(values[j], wanted[j], 1e-5 * (1 + std::abs(wanted[j])));
    }
    if (device.type() == kQuartz) {
      EXPECT_EQ(a[i].key_set(), on_quartz({}).key_set());
    }
  }
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (actual[i].isScalar()) {
      EXPECT_EQ(actual[i].toScalar().toDouble(), expected[i].toScalar().toDouble());
    }
  }
}

class HotOperators : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, HotOperators, ::testing::ValuesIn(right_cases()));

TEST_P(HotOperators, EqualTheNativeOnesAndTheBoxedFallback) {
  const auto op = handle(GetParam());
  ASSERT_TRUE(op.hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) << "not registered by name";
  const Stack native_arguments = copies(GetParam().arguments);
  const Stack unboxed_arguments = on_device(native_arguments), boxed_arguments = on_device(native_arguments);

  Stack native_results = native_arguments, unboxed_results = unboxed_arguments, boxed_results = boxed_arguments;
  op.callBoxed(native_results);
  const auto& counter = op_counter(full_name(op.operator_name()));
  const auto own_calls = counter.own.load();
  op.callBoxed(unboxed_results);
  const bool own = counter.own.load() != own_calls;
  FallbackKernel boxed(op.schema());
  boxed(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &boxed_results);

  const c10::Device first(kQuartz, 0);
  expect_same(unboxed_results, native_results, first, own);
  expect_same(boxed_results, native_results, first);
  // Written arguments, and those that must not be.
  expect_same(unboxed_arguments, native_arguments, first, own);
  expect_same(boxed_arguments, native_arguments, first);
}

// In-place and out= hand the argument itself back, and move its version as the native operator does.
TEST_P(HotOperators, WrittenArgumentsAreReturnedAndVersioned) {
  const auto op = handle(GetParam());
  const Stack native_arguments = copies(GetParam().arguments), arguments = on_device(native_arguments);
  Stack native_results = native_arguments, results = arguments;
  op.callBoxed(native_results);
  op.callBoxed(results);
  const auto expected = tensors_of(native_arguments), actual = tensors_of(arguments);
  for (std::size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i]._version() > 0, expected[i]._version() > 0) << "argument " << i;
  }
  const auto& schema = op.schema();
  for (std::size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    for (std::size_t j = 0; j < schema.arguments().size(); ++j) {
      const auto* written = schema.arguments()[j].alias_info();
      if (written != nullptr && *written == *alias) {
        EXPECT_TRUE(results[i].toTensor().is_same(arguments[j].toTensor()));
      }
    }
  }
}

// Every tensor operand in turn on the CPU, beside one that is not.
TEST_P(HotOperators, RefuseACpuOperandByName) {
  const auto op = handle(GetParam());
  const Stack arguments = on_device(copies(GetParam().arguments));
  if (tensors_of(arguments).size() < 2) return;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isOptionalTensorList()) continue;  // indices may stay on the CPU
    bool moved = false;
    Stack wrong = arguments;
    wrong[i] = map_tensors(arguments[i], [&](const Tensor& tensor) {
      if (moved) return tensor;
      moved = true;
      return tensor.cpu();
    });
    if (!moved) continue;
    QUARTZ_EXPECT_ERROR(c10::Error, "argument '" + op.schema().arguments()[i].name() + "'", op.callBoxed(wrong));
  }
  EXPECT_TRUE(still_works());
}

class WrongCalls : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(All, WrongCalls, ::testing::ValuesIn(wrong_cases()));

TEST_P(WrongCalls, FailAsOnTheNativeDeviceAndLeaveEverythingUsable) {
  const auto op = handle(GetParam());
  const Stack native_arguments = copies(GetParam().arguments), arguments = on_device(native_arguments);
  const auto before = allocator().getDeviceStats(0).allocated_bytes[0].current;
  std::string expected, actual;
  try {
    Stack stack = native_arguments;
    op.callBoxed(stack);
    FAIL() << "the native operator accepts this";
  } catch (const c10::Error& error) {
    expected = error.what_without_backtrace();
  }
  try {
    Stack stack = arguments;
    op.callBoxed(stack);
    FAIL() << "accepted; the native error is: " << expected;
  } catch (const c10::Error& error) {
    actual = error.what_without_backtrace();
  }
  // The native text, then the call; arguments that are no tensors are not in it. An empty list is no quartz call, and
  // the autograd kernels of _foreach operators compare lengths before there is one.
  const auto name = full_name(op.operator_name());
  if (tensors_of(arguments).empty() || name.find("_foreach_") != std::string::npos) {
    EXPECT_EQ(actual, expected);
  } else {
    ASSERT_EQ(actual.substr(0, expected.size()), expected);
    const auto call = actual.substr(expected.size());
    EXPECT_TRUE(contains(call, " kernel of\n  quartz: " + name + "("));
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const bool shown = arguments[i].isTensor() || arguments[i].isTensorList() || arguments[i].isOptionalTensorList();
      EXPECT_EQ(call.find(op.schema().arguments()[i].name() + ": ") != std::string::npos, shown) << call;
    }
    Stack stack = arguments;
    FallbackKernel boxed(op.schema());
    try {
      boxed(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), &stack);
      FAIL() << "accepted by the boxed fallback";
    } catch (const c10::Error& error) {
      EXPECT_EQ(error.what_without_backtrace(), actual);
    }
  }
  for (const auto& tensor : tensors_of(arguments)) {
    const auto* twin = twin_of(*tensor.storage().unsafeGetStorageImpl());
    ASSERT_NE(twin, nullptr);
    EXPECT_EQ(tensor.storage().data(), twin->data());
  }
  EXPECT_GE(allocator().getDeviceStats(0).allocated_bytes[0].current, before);
  EXPECT_TRUE(still_works());
}

}  // namespace
}  // namespace quartz::test
