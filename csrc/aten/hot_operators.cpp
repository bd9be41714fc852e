// The fallback without boxing, for operators that are called so often on small tensors that dispatch cost is their cost
// (docs/benchmarks.md). One template does what fallback.cpp does, on the C++ signature instead of the schema; the table
// below names the operators. Leaving one out costs speed only.
#include "aten/alias.h"  // first: the *_ops.h headers do not include what they need

#include <ATen/ops/_foreach_add_ops.h>
#include <ATen/ops/_foreach_mul_ops.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_ops.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_ops.h>
#include <ATen/ops/_softmax_ops.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addcmul_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/all_ops.h>
#include <ATen/ops/any_ops.h>
#include <ATen/ops/arange_ops.h>
#include <ATen/ops/argmax_ops.h>
#include <ATen/ops/baddbmm_ops.h>
#include <ATen/ops/bitwise_and_ops.h>
#include <ATen/ops/bitwise_not_ops.h>
#include <ATen/ops/bitwise_or_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/cat_ops.h>
#include <ATen/ops/clamp_ops.h>
#include <ATen/ops/cos_ops.h>
#include <ATen/ops/cumsum_ops.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/eq_ops.h>
#include <ATen/ops/exp_ops.h>
#include <ATen/ops/fill_ops.h>
#include <ATen/ops/gather_ops.h>
#include <ATen/ops/ge_ops.h>
#include <ATen/ops/gelu_ops.h>
#include <ATen/ops/gt_ops.h>
#include <ATen/ops/index_ops.h>
#include <ATen/ops/index_select_ops.h>
#include <ATen/ops/isin_ops.h>
#include <ATen/ops/isneginf_ops.h>
#include <ATen/ops/le_ops.h>
#include <ATen/ops/logical_not_ops.h>
#include <ATen/ops/lt_ops.h>
#include <ATen/ops/masked_fill_ops.h>
#include <ATen/ops/max_ops.h>
#include <ATen/ops/mean_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_ops.h>
#include <ATen/ops/ne_ops.h>
#include <ATen/ops/neg_ops.h>
#include <ATen/ops/pow_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/rsqrt_ops.h>
#include <ATen/ops/sigmoid_ops.h>
#include <ATen/ops/silu_ops.h>
#include <ATen/ops/sin_ops.h>
#include <ATen/ops/sqrt_ops.h>
#include <ATen/ops/sub_ops.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/tanh_ops.h>
#include <ATen/ops/where_ops.h>
#include <ATen/ops/zero_ops.h>

#include <tuple>
#include <type_traits>

#include <ATen/core/dispatch/Dispatcher.h>

#include "aten/call_error.h"
#include "aten/op_counts.h"
#include "aten/registration.h"

namespace quartz {
namespace {

using OptionalTensorList = c10::List<std::optional<at::Tensor>>;

// Arguments. The aliases of a list live as long as the call.
template <class T>
struct Native {
  T value;
  Native(T argument, AliasScope&) : value(argument) {}
  T get() { return value; }
};
template <>
struct Native<const at::Tensor&> {
  BorrowedTensor alias;
  Native(const at::Tensor& argument, AliasScope& scope) : alias(scope.borrow_native(argument)) {}
  const at::Tensor& get() { return *alias; }
};
template <>
struct Native<at::Tensor&> {  // in-place or out=; a kernel could assign to the reference, so it is not a borrowed one
  at::Tensor alias;
  Native(at::Tensor& argument, AliasScope& scope) : alias(scope.to_native(argument, Operand::kWritten)) {}
  at::Tensor& get() { return alias; }
};
template <>
struct Native<const std::optional<at::Tensor>&> {
  std::optional<at::Tensor> alias;
  Native(const std::optional<at::Tensor>& argument, AliasScope& scope) {
    if (argument && argument->defined()) alias = scope.to_native(*argument);
  }
  const std::optional<at::Tensor>& get() { return alias; }
};
template <>
struct Native<at::TensorList> {
  c10::SmallVector<BorrowedTensor, 4> aliases;
  template <class List>
  Native(const List& argument, AliasScope& scope, Operand operand = Operand::kRead) {
    aliases.reserve(argument.size());
    for (const at::Tensor& tensor : argument) aliases.push_back(scope.borrow_native(tensor, operand));
  }
  at::TensorList get() { return {aliases.empty() ? nullptr : &*aliases.front(), aliases.size()}; }
};
template <>
struct Native<const at::ITensorListRef&> : Native<at::TensorList> {
  at::ITensorListRef list;
  Native(const at::ITensorListRef& argument, AliasScope& scope) : Native<at::TensorList>(argument, scope) {}
  const at::ITensorListRef& get() { return list = at::ITensorListRef(Native<at::TensorList>::get()); }
};
template <>
struct Native<const OptionalTensorList&> {  // indices: those may stay on the CPU
  OptionalTensorList aliases;
  Native(const OptionalTensorList& argument, AliasScope& scope) {
    aliases.reserve(argument.size());
    for (std::optional<at::Tensor> tensor : argument) {
      if (tensor && tensor->defined()) {
        aliases.push_back(scope.to_native(*tensor, Operand::kIndex));
      } else {
        aliases.push_back(std::nullopt);
      }
    }
  }
  const OptionalTensorList& get() { return aliases; }
};

// The type of a list does not tell whether it is written; that an operator returns nothing does (in-place foreach).
template <class Argument, class Result>
Native<Argument> make_native(Argument argument, AliasScope& scope) {
  if constexpr (std::is_same_v<Argument, at::TensorList>) {
    return Native<Argument>(argument, scope, std::is_void_v<Result> ? Operand::kWritten : Operand::kRead);
  } else {
    return Native<Argument>(argument, scope);
  }
}

// Results.
at::Tensor to_quartz(at::Tensor native, AliasScope& scope) { return scope.relabel_or_adopt(std::move(native)); }
std::vector<at::Tensor> to_quartz(std::vector<at::Tensor> native, AliasScope& scope) {
  for (auto& tensor : native) tensor = scope.relabel_or_adopt(std::move(tensor));
  return native;
}
template <class... T>
std::tuple<T...> to_quartz(std::tuple<T...> native, AliasScope& scope) {
  return std::apply([&](auto&... parts) { return std::tuple<T...>{to_quartz(std::move(parts), scope)...}; }, native);
}
at::Scalar to_quartz(at::Scalar native, AliasScope&) { return native; }

// A tensor argument, or one that contains tensors, as the schema sees it: for errors.
template <class T>
c10::IValue boxed(const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>> ||
                std::is_same_v<T, OptionalTensorList>) {
    return argument;
  } else if constexpr (std::is_same_v<T, at::TensorList> || std::is_same_v<T, at::ITensorListRef>) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& element : argument) list.push_back(element);
    return list;
  } else {
    return {};
  }
}

// The one argument of type Tensor& (in-place and out= operators with a single result).
inline at::Tensor* written(at::Tensor& tensor) { return &tensor; }
template <class T>
at::Tensor* written(const T&) {
  return nullptr;
}

void explain_failure(c10::Error& error, AliasScope& scope, const c10::FunctionSchema& schema, FailedCall call) {
  for (const auto& argument : schema.arguments()) call.names.push_back(argument.name());
  if (const auto* misplaced = scope.misplaced_operand()) {
    scope.throw_mixed_devices(call.op, call.argument_with(misplaced));
  }
  scope.follow_resized();
  translate_out_of_memory(error, scope.has_device() ? scope.device().index() : current_device());
  call.add_to(error);
}

template <class Op, class Signature = typename Op::schema>
struct Unboxed;

template <class Op, class Result, class... Arguments>
struct Unboxed<Op, Result(Arguments...)> {
  static inline OpCounter* counter = nullptr;
  static inline bool no_scalars = false;

  static Result call(Arguments... arguments) {
    counter->count_fallback();
    const c10::impl::ExcludeDispatchKeyGuard below(std::is_void_v<Result> ? above_list_writers() : kAboveKernels);
    AliasScope scope;
    try {
      std::tuple<Native<Arguments>...> natives{make_native<Arguments, Result>(arguments, scope)...};
      if (C10_UNLIKELY(no_scalars)) scope.refuse_scalars();
      if (C10_UNLIKELY(scope.misplaced_operand() != nullptr)) scope.throw_mixed_devices(counter->name, "");
      if constexpr (std::is_void_v<Result>) {
        std::apply([](auto&... native) { Op::redispatch(keys(), native.get()...); }, natives);
        if (!substrate().is_cuda()) bump_versions(arguments...);
      } else if constexpr (std::is_same_v<Result, at::Tensor&>) {
        std::apply([](auto&... native) { Op::redispatch(keys(), native.get()...); }, natives);
        return *write_back(scope, arguments...);
      } else {
        return to_quartz(std::apply([](auto&... native) { return Op::redispatch(keys(), native.get()...); }, natives),
                         scope);
      }
    } catch (c10::Error& error) {
      explain(error, scope, {boxed(arguments)...});
      throw;
    } catch (...) {
      scope.follow_resized();
      throw;
    }
  }

 private:
  template <class... Given>
  static at::Tensor* write_back(AliasScope& scope, Given&... arguments) {
    at::Tensor* result = nullptr;
    ((result = written(arguments) != nullptr ? written(arguments) : result), ...);
    if (result != nullptr) scope.write_back(*result);
    return result;
  }

  static void explain(c10::Error& error, AliasScope& scope, std::vector<c10::IValue> arguments) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
    explain_failure(error, scope, op.schema(), {counter->name, {}, std::move(arguments)});
  }

  // An in-place foreach operator of the CPU writes through add_ and its kind, above which we excluded the key that
  // counts versions; without a count autograd would not see that a saved tensor has changed. The written list comes
  // first.
  template <class... Rest>
  static void bump_versions(at::TensorList written, const Rest&...) {
    for (const auto& tensor : written) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  static c10::DispatchKeySet keys() { return c10::DispatchKeySet(substrate().keys().dense); }
};

template <class Op>
void add(torch::Library& library) {
  const auto op = c10::Dispatcher::singleton().findSchema({Op::name, Op::overload_name});
  if (op && op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) return;  // an own kernel stands there
  std::string name = Op::name;
  if (*Op::overload_name != '\0') name += std::string(".") + Op::overload_name;
  Unboxed<Op>::counter = &op_counter(name);
  Unboxed<Op>::no_scalars = refuses_scalars(name);
  library.impl(name.substr(name.find("::") + 2).c_str(), TORCH_FN(Unboxed<Op>::call));
}

template <class... Ops>
void add_all(torch::Library& library) {
  (add<Ops>(library), ...);
}

}  // namespace

void register_hot_operators(torch::Library& library) {
  namespace ops = at::_ops;
  // Pointwise arithmetic.
  add_all<ops::add_Tensor, ops::add__Tensor, ops::add_out, ops::sub_Tensor, ops::sub__Tensor, ops::mul_Tensor,
          ops::mul__Tensor, ops::div_Tensor, ops::div__Tensor, ops::neg, ops::exp, ops::rsqrt, ops::sqrt, ops::cos,
          ops::sin, ops::tanh, ops::sigmoid, ops::silu, ops::gelu, ops::relu, ops::pow_Tensor_Scalar, ops::addcmul,
          ops::where_self, ops::clamp, ops::fill__Scalar, ops::zero_, ops::masked_fill__Scalar>(library);
  // Comparisons and logic.
  add_all<ops::eq_Tensor, ops::eq_Scalar, ops::ne_Scalar, ops::lt_Tensor, ops::lt_Scalar, ops::le_Tensor,
          ops::gt_Tensor, ops::gt_Scalar, ops::ge_Tensor, ops::ge_Scalar, ops::bitwise_and_Tensor,
          ops::bitwise_or_Tensor, ops::bitwise_not, ops::logical_not, ops::isneginf, ops::isin_Tensor_Tensor>(library);
  // Products.
  add_all<ops::mm, ops::addmm, ops::bmm, ops::baddbmm>(library);
  // Reductions.
  add_all<ops::mean_dim, ops::sum_dim_IntList, ops::max, ops::argmax, ops::any, ops::any_dim, ops::all, ops::all_dim,
          ops::cumsum, ops::_softmax, ops::native_layer_norm>(library);
  // Attention.
  add_all<ops::_scaled_dot_product_flash_attention_for_cpu, ops::_scaled_dot_product_efficient_attention>(library);
  // Moving data.
  add_all<ops::cat, ops::embedding, ops::index_Tensor, ops::index_select, ops::gather, ops::arange_start_out,
          ops::_local_scalar_dense>(library);
  // Optimisers.
  add_all<ops::_foreach_add_Scalar, ops::_foreach_add_List, ops::_foreach_add__Scalar, ops::_foreach_add__List,
          ops::_foreach_mul_Scalar, ops::_foreach_mul__Scalar, ops::_foreach_mul_List, ops::_foreach_mul__List>(
      library);
}

}  // namespace quartz
