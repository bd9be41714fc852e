#include "operators.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "runtime/substrate.h"

namespace quartz::test {

c10::OperatorHandle find_operator(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), "");
}

std::vector<std::string>& seen() {
  static std::vector<std::string> names;
  return names;
}

namespace {

using at::Tensor;
using c10::IValue;
using OptionalTensor = std::optional<Tensor>;

const Tensor& native(const Tensor& x) {
  if (!x.defined()) {
    seen().push_back("undefined");
    return x;
  }
  seen().push_back(x.device().is_cpu() ? "cpu" : "cuda");
  TORCH_CHECK(x.device().type() == substrate().native_type(), "quartz_test: a kernel got a tensor on ", x.device());
  return x;
}

void add_to(Tensor& total, const Tensor& x) {
  if (native(x).defined()) total = total.defined() ? total.add(x) : x.clone();
}

Tensor twice(const Tensor& x) { return native(x).mul(2); }

Tensor plus_optional(const Tensor& x, const OptionalTensor& y) {
  if (!y.has_value()) seen().push_back("none");
  return y.has_value() && native(*y).defined() ? native(x).add(*y) : native(x).clone();
}

Tensor sum_list(at::TensorList xs) {
  Tensor total;
  for (const auto& x : xs) add_to(total, x);
  return total;
}

Tensor sum_optional_list(const c10::List<OptionalTensor>& xs) {
  Tensor total;
  for (const OptionalTensor& x : xs) {
    if (x.has_value()) {
      add_to(total, *x);
    } else {
      seen().push_back("none");
    }
  }
  return total;
}

// Any nesting of lists, tuples and dictionaries.
void add_all(Tensor& total, const IValue& value) {
  if (value.isTensor()) {
    add_to(total, value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) add_all(total, element);
  } else if (value.isList()) {
    for (const IValue& element : value.toList()) add_all(total, element);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) add_all(total, entry.value());
  }
}
void sum_nested(const c10::OperatorHandle&, Stack* stack) {
  Tensor total;
  add_all(total, torch::jit::pop(*stack));
  if (!stack->empty()) add_all(total, torch::jit::pop(*stack));
  torch::jit::push(*stack, std::move(total));
}

// (x) -> {"same": x, "twice": 2 x}, ((x, 2 x), 7), [[x], [2 x, 3 x]]
void make_nested(const c10::OperatorHandle&, Stack* stack) {
  const Tensor x = native(torch::jit::pop(*stack).toTensor());
  c10::Dict<std::string, Tensor> dict;
  dict.insert("same", x);
  dict.insert("twice", x.mul(2));
  c10::List<c10::List<Tensor>> lists;
  lists.push_back(c10::List<Tensor>({x}));
  lists.push_back(c10::List<Tensor>({x.mul(2), x.mul(3)}));
  torch::jit::push(*stack, dict, std::make_tuple(std::make_tuple(x, x.mul(2)), int64_t{7}), lists);
}

Tensor moved(const Tensor& x, std::optional<c10::Device> device) {
  seen().push_back(device.has_value() ? device->str() : "none");
  return device.has_value() ? x.to(*device) : x;
}

Tensor ones_on(c10::Device device) {
  seen().push_back(device.str());
  return at::ones({2}, device);
}

Tensor noise(const Tensor& x, std::optional<at::Generator> generator) {
  seen().push_back(generator.has_value() ? generator->device().str() : "none");
  return at::empty_like(native(x)).uniform_(0, 1, std::move(generator));
}

Tensor of_storage(const Tensor& x, c10::Storage storage) {
  seen().push_back(storage.device().str());
  return at::empty_like(native(x)).set_(std::move(storage), x.storage_offset(), x.sizes(), x.strides());
}

Tensor on_stream(const Tensor& x, c10::Stream stream) {
  seen().push_back(c10::DeviceTypeName(stream.device_type(), /*lower_case=*/true));
  return native(x).add(stream.id());
}

Tensor& add_one_(Tensor& x) { return native(x).defined() ? x.add_(1) : x; }

void add_one_to_all_(at::TensorList xs) {
  for (Tensor x : xs) native(x).add_(1);
}

Tensor& repeated_out(const Tensor& x, int64_t count, Tensor& out) {
  native(x), native(out);
  const auto value = x.repeat({count});  // before out, which may be x
  out.resize_(value.sizes());
  return out.copy_(value);
}

Tensor& resize_and_fail_(Tensor& x, int64_t size) {
  native(x).resize_({size});
  TORCH_CHECK_INDEX(false, "quartz_test: failed after the resize");
  return x;
}

Tensor tail(const Tensor& x) { return native(x).slice(0, 1); }
std::vector<Tensor> halves(const Tensor& x) { return native(x).chunk(2); }
Tensor same(const Tensor& x) { return native(x); }
Tensor second(const Tensor&, const Tensor& y) { return native(y); }
std::tuple<Tensor, Tensor> one_twice(const Tensor& x) {
  const auto result = native(x).mul(2);
  return {result, result};
}
Tensor nothing(const Tensor& x) { return native(x), Tensor(); }

// Two results over one new block of memory.
std::tuple<Tensor, Tensor> two_views(const Tensor& x) {
  const auto block = native(x).mul(2);
  return {block.slice(0, 0, 2), block.slice(0, 1)};
}

Tensor& set_to_(Tensor& x, const Tensor& y) { return native(x).set_(native(y)); }
Tensor& set_to_new_(Tensor& x) { return native(x).set_(at::ones({5}, x.options())); }
std::tuple<Tensor&, Tensor&> exchange_(Tensor& x, Tensor& y) {
  const auto kept = native(x).alias();
  return {x.set_(native(y)), y.set_(kept)};
}
Tensor& conjugate_(Tensor& x) {
  native(x).unsafeGetTensorImpl()->_set_conj(!x.is_conj());
  return x;
}

TORCH_LIBRARY(quartz_test, m) {
  m.def("twice(Tensor x) -> Tensor");
  m.def("plus_optional(Tensor x, Tensor? y) -> Tensor");
  m.def("sum_list(Tensor[] xs) -> Tensor");
  m.def("sum_optional_list(Tensor?[] xs) -> Tensor");
  m.def("sum_lists(Tensor x, Tensor[][] xs) -> Tensor");
  m.def("sum_dict(Tensor x, Dict(str, Tensor) xs) -> Tensor");
  m.def("sum_tuple(Tensor x, (Tensor, (Tensor, int)) xs) -> Tensor");
  m.def("sum_any(Any xs) -> Tensor");
  m.def("make_nested(Tensor x) -> (Dict(str, Tensor), ((Tensor, Tensor), int), Tensor[][])");
  m.def("moved(Tensor x, Device? device) -> Tensor");
  m.def("ones_on(Device device) -> Tensor");
  m.def("noise(Tensor x, Generator? generator) -> Tensor");
  m.def("of_storage(Tensor x, Storage storage) -> Tensor");
  m.def("on_stream(Tensor x, Stream stream) -> Tensor");
  m.def("add_one_(Tensor(a!) x) -> Tensor(a!)");
  m.def("add_one_to_all_(Tensor(a!)[] xs) -> ()");
  m.def("repeated_out(Tensor x, int count, *, Tensor(a!) out) -> Tensor(a!)");
  m.def("resize_and_fail_(Tensor(a!) x, int size) -> Tensor(a!)");
  m.def("tail(Tensor(a) x) -> Tensor(a)");
  m.def("halves(Tensor(a -> *) x) -> Tensor(a)[]");
  m.def("same(Tensor x) -> Tensor");
  m.def("second(Tensor x, Tensor y) -> Tensor");
  m.def("nothing(Tensor x) -> Tensor");
  m.def("one_twice(Tensor x) -> (Tensor, Tensor)");
  m.def("two_views(Tensor x) -> (Tensor, Tensor)");
  m.def("set_to_(Tensor(a!) x, Tensor y) -> Tensor(a!)");
  m.def("set_to_new_(Tensor(a!) x) -> Tensor(a!)");
  m.def("exchange_(Tensor(a!) x, Tensor(b!) y) -> (Tensor(a!), Tensor(b!))");
  m.def("conjugate_(Tensor(a!) x) -> Tensor(a!)");
}

void implement(torch::Library& m) {
  m.impl("twice", twice);
  m.impl("plus_optional", plus_optional);
  m.impl("sum_list", sum_list);
  m.impl("sum_optional_list", sum_optional_list);
  for (const char* name : {"sum_lists", "sum_dict", "sum_tuple", "sum_any"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&sum_nested>());
  }
  m.impl("make_nested", torch::CppFunction::makeFromBoxedFunction<&make_nested>());
  m.impl("moved", moved);
  m.impl("ones_on", ones_on);
  m.impl("noise", noise);
  m.impl("of_storage", of_storage);
  m.impl("on_stream", on_stream);
  m.impl("add_one_", add_one_);
  m.impl("add_one_to_all_", add_one_to_all_);
  m.impl("repeated_out", repeated_out);
  m.impl("resize_and_fail_", resize_and_fail_);
  m.impl("tail", tail);
  m.impl("halves", halves);
  m.impl("same", same);
  m.impl("second", second);
  m.impl("nothing", nothing);
  m.impl("one_twice", one_twice);
  m.impl("two_views", two_views);
  m.impl("set_to_", set_to_);
  m.impl("set_to_new_", set_to_new_);
  m.impl("exchange_", exchange_);
  m.impl("conjugate_", conjugate_);
}

TORCH_LIBRARY_IMPL(quartz_test, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(quartz_test, CUDA, m) { implement(m); }

}  // namespace
}  // namespace quartz::test
