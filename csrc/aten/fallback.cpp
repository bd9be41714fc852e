#include "aten/fallback.h"

#include <ATen/core/List.h>
#include <ATen/core/jit_type.h>
#include <algorithm>
#include <deque>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>

#include "aten/alias.h"
#include "aten/call_error.h"
#include "runtime/generator.h"
#include "runtime/guard.h"

namespace quartz {
namespace {

using c10::IValue;
using c10::TypeKind;
using torch::jit::Stack;
using Kind = OpFacts::Kind;

// Operators whose schema takes CPU tensors beside device tensors: lengths, sizes, scales, a value that is read out.
bool takes_cpu_operands(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::_pack_padded_sequence",
                                                     "aten::_pack_padded_sequence_backward",
                                                     "aten::_ctc_loss.Tensor",
                                                     "aten::fill_.Tensor",
                                                     "aten::_amp_update_scale_",
                                                     "aten::_nested_tensor_from_tensor_list",
                                                     "aten::tensor_split.tensor_indices_or_sections",
                                                     "aten::_nested_view_from_buffer",
                                                     "aten::_nested_from_padded"};
  return names.count(name) != 0;
}

bool mentions_tensor(const c10::Type& type) {
  if (type.kind() == TypeKind::TensorType) return true;
  for (const auto& contained : type.containedTypes()) {
    if (mentions_tensor(*contained)) return true;
  }
  return false;
}

std::optional<Kind> kind_of(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case TypeKind::TensorType:
      return Kind::kTensor;
    case TypeKind::GeneratorType:
      return Kind::kGenerator;
    case TypeKind::DeviceObjType:
      return Kind::kDevice;
    case TypeKind::StorageType:
      return Kind::kStorage;
    case TypeKind::StreamObjType:
      return Kind::kStream;
    case TypeKind::ListType: {
      const auto& element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == TypeKind::TensorType) return Kind::kTensorList;
      if (element->kind() == TypeKind::OptionalType && mentions_tensor(*element)) return Kind::kOptionalTensorList;
      break;
    }
    default:
      break;
  }
  // Tensors inside dictionaries, tuples and lists of lists (custom operators), and `Any`.
  if (mentions_tensor(*type) || type->kind() == TypeKind::AnyType) return Kind::kNested;
  return std::nullopt;
}

// Applies `map` to every tensor inside nested containers.
template <class Map>
IValue map_nested(const IValue& value, const Map& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTuple()) {
    std::vector<IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(map_nested(element, map));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    const auto list = value.toList();
    c10::impl::GenericList result(list.elementType());
    for (const IValue& element : list) result.push_back(map_nested(element, map));
    return result;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict result(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) result.insert(entry.key(), map_nested(entry.value(), map));
    return result;
  }
  return value;
}

// One call of the fallback.
class Call {
 public:
  Call(const OpFacts& facts, Stack& stack) : facts_(facts), stack_(stack), base_(stack.size() - facts.argument_count) {}

  void map_arguments() {
    try {
      for (const auto& argument : facts_.arguments) {
        auto& value = stack_[base_ + argument.index];
        if (value.isNone() || argument.kind == Kind::kGenerator) continue;
        originals_.push_back({argument.index, argument.written, value});
        map_argument(value, argument);
      }
    } catch (const c10::Error&) {
      if (!scope_.has_two_devices()) throw;
      scope_.throw_mixed_devices(facts_.counter.name, facts_.argument_names[originals_.back().index]);
    }
    if (C10_UNLIKELY(facts_.no_scalars)) scope_.refuse_scalars();
    if (C10_UNLIKELY(scope_.misplaced_operand() != nullptr && !facts_.mixed_devices)) {
      scope_.throw_mixed_devices(facts_.counter.name, as_given().argument_with(scope_.misplaced_operand()));
    }
    for (const auto& argument : facts_.arguments) {  // after the device is known
      if (argument.kind == Kind::kGenerator) map_generator(stack_[base_ + argument.index]);
    }
  }

  // After the kernel has run: whether it has read and made tensors of integers and bools alone.
  bool is_exact() const {
    bool any = false;
    const auto floats = [&](const IValue& value) {
      const auto inexact = [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return false;
        any = true;
        return !at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
      };
      if (value.isTensor()) return inexact(value.toTensor());
      if (!value.isTensorList()) return false;
      const auto elements = value.toListRef();
      return std::any_of(elements.begin(), elements.end(), [&](const IValue& e) { return inexact(e.toTensor()); });
    };
    for (const auto& original : originals_) {
      if (floats(original.value)) return false;
    }
    for (std::size_t i = stack_.size() - facts_.return_count; i < stack_.size(); ++i) {
      if (floats(stack_[i])) return false;
    }
    return any;
  }

  // After the kernel has failed.
  void follow_resized() { scope_.follow_resized(); }
  void explain(c10::Error& error) const {
    translate_out_of_memory(error, scope_.has_device() ? scope_.device().index() : current_device());
    as_given().add_to(error);
  }

  void bump_versions() {
    const auto bump = [](const at::Tensor& tensor) {
      if (is_quartz(tensor) && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
      return IValue(tensor);
    };
    for (const auto& original : originals_) {
      if (original.written) map_nested(original.value, bump);
    }
  }

  void map_results() {
    for (const auto& original : originals_) {
      if (original.written) write_back(original.value);
    }
    const auto first = stack_.size() - facts_.return_count;
    for (std::size_t i = 0; i < facts_.return_count; ++i) {
      auto& value = stack_[first + i];
      if (facts_.returned_argument[i] >= 0) {
        for (const auto& original : originals_) {
          if (static_cast<int>(original.index) == facts_.returned_argument[i]) value = original.value;
        }
      } else if (scope_.has_device()) {
        map_result(value);
      }
    }
  }

 private:
  struct Original {
    uint32_t index;
    bool written;
    IValue value;
  };

  // On the stack aliases have replaced the tensors.
  FailedCall as_given() const {
    FailedCall call{facts_.counter.name, facts_.argument_names, std::vector<IValue>(facts_.argument_count)};
    for (const auto& argument : facts_.arguments) {
      if (argument.kind > Kind::kNested) continue;  // no tensor can be in it
      for (const auto& original : originals_) {
        if (original.index == argument.index) call.values[argument.index] = original.value;
      }
    }
    return call;
  }

  void map_argument(IValue& value, const OpFacts::Argument& argument) {
    const auto operand = argument.written ? Operand::kWritten : Operand::kRead;
    switch (argument.kind) {
      case Kind::kTensor:
        if (value.isTensor()) value = scope_.to_native(value.toTensor(), operand);
        break;
      case Kind::kTensorList: {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(scope_.to_native(tensor, operand));
        value = std::move(list);
        break;
      }
      case Kind::kOptionalTensorList: {
        // Indices: those may stay on the CPU for every device.
        c10::List<std::optional<at::Tensor>> list;
        for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
          if (tensor && tensor->defined()) {
            list.push_back(scope_.to_native(*tensor, argument.written ? operand : Operand::kIndex));
          } else {
            list.push_back(std::nullopt);
          }
        }
        value = std::move(list);
        break;
      }
      case Kind::kNested:
        value = map_nested(value, [this](const at::Tensor& tensor) { return IValue(scope_.to_native(tensor)); });
        break;
      case Kind::kDevice: {
        const auto device = value.toDevice();
        if (device.type() == c10::DeviceType::CPU) asked_for_cpu_ = true;
        if (device.type() != kQuartz) break;
        if (device.has_index()) check_device(device.index());
        if (!scope_.has_device()) scope_.take_device(device);
        scope_.set_result_device(c10::Device(kQuartz, resolve_device(device.index())));
        value = substrate().native_device(resolve_device(device.index()));
        break;
      }
      case Kind::kStorage:
        value = scope_.to_native(value.toStorage());
        break;
      case Kind::kStream: {
        const auto stream = value.toStream();
        if (stream.device_type() == kQuartz && substrate().is_cuda()) value = native_stream(stream);
        break;
      }
      case Kind::kGenerator:
        break;
    }
  }

  void map_generator(IValue& value) {
    if (value.isNone()) {
      if (scope_.has_device()) value = native_generator(default_generator(scope_.device().index()));
      return;
    }
    const auto generator = value.toGenerator();
    const bool quartz = generator.device().type() == kQuartz;
    TORCH_CHECK(quartz == scope_.has_device(), "Expected a '", scope_.has_device() ? scope_.device().str() : "cpu",
                "' device type for generator but found '", generator.device(), "'");
    if (quartz) value = native_generator(generator);
  }

  void write_back(const IValue& value) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) scope_.write_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) scope_.write_back(tensor);
    } else if (value.isOptionalTensorList()) {
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor && tensor->defined()) scope_.write_back(*tensor);
      }
    }
  }

  at::Tensor map_output(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    // device="cpu" was an argument: the result stays there, but never as memory that a quartz tensor owns.
    if (C10_UNLIKELY(asked_for_cpu_)) return scope_.is_alias_of_argument(tensor) ? tensor.clone() : tensor;
    return scope_.to_quartz(tensor);
  }

  void map_result(IValue& value) {
    if (value.isTensor()) {
      value = map_output(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map_output(tensor));
      value = std::move(list);
    } else if (value.isTuple() || value.isGenericDict() || value.isList()) {
      value = map_nested(value, [this](const at::Tensor& tensor) { return IValue(map_output(tensor)); });
    }
  }

  const OpFacts& facts_;
  Stack& stack_;
  const std::size_t base_;
  c10::SmallVector<Original, 6> originals_;  // the arguments as given; keeps them alive for scope_
  AliasScope scope_;
  bool asked_for_cpu_ = false;
};

void run(const OpFacts& facts, const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  facts.counter.count_fallback();
  // Collectives write to tensors that their schemas do not mark as written: on aliases they would do nothing.
  TORCH_CHECK_NOT_IMPLEMENTED(!C10_UNLIKELY(facts.custom && facts.counter.name.rfind("c10d::", 0) == 0),
                              "quartz: ", facts.counter.name,
                              " is not supported: there is no process group for quartz tensors. ",
                              "Move them to the CPU (gloo) or to cuda (nccl) for the collective");
  // A kernel above, or the native one through the shared counter, has counted the versions of the in-place arguments of
  // PyTorch's operators; for a custom operator without a kernel above it is done here.
  const bool counted = !facts.custom || c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
  const c10::impl::ExcludeDispatchKeyGuard below(C10_UNLIKELY(facts.list_writer) ? above_list_writers()
                                                                                 : kAboveKernels);
  Call call(facts, *stack);
  call.map_arguments();
  try {
    op.redispatchBoxed(native_dispatch_keys(keys), stack);
  } catch (c10::Error& error) {
    call.follow_resized();
    call.explain(error);
    throw;
  } catch (...) {
    call.follow_resized();
    throw;
  }
  if (call.is_exact()) facts.counter.count_exact();
  if (C10_UNLIKELY(!counted)) call.bump_versions();
  call.map_results();
}

// Facts of operators that come here as the backend fallback; the key is the address of the dispatcher's entry.
struct KnownFacts {
  std::shared_mutex mutex;
  std::unordered_map<const void*, const OpFacts*> facts;
  std::deque<OpFacts> all;  // also those of operators that are gone: a call may be under way
};

KnownFacts& known_facts() {
  static auto* known = new KnownFacts;
  return *known;
}

const OpFacts& facts_of(const c10::OperatorHandle& op) {
  auto& known = known_facts();
  const void* key = &op.operator_name();
  {
    std::shared_lock lock(known.mutex);
    auto found = known.facts.find(key);
    if (found != known.facts.end()) return *found->second;
  }
  std::unique_lock lock(known.mutex);
  auto*& facts = known.facts[key];
  if (facts == nullptr) facts = &known.all.emplace_back(op.schema());
  return *facts;
}

}  // namespace

OpFacts::OpFacts(const c10::FunctionSchema& schema)
    : counter(op_counter(full_name(schema.operator_name()))),
      argument_count(schema.arguments().size()),
      return_count(schema.returns().size()),
      mixed_devices(takes_cpu_operands(counter.name)),
      no_scalars(refuses_scalars(counter.name)),
      custom(counter.name.rfind("aten::", 0) != 0) {
  for (std::size_t i = 0; i < argument_count; ++i) {
    const auto& argument = schema.arguments()[i];
    argument_names.push_back(argument.name());
    const auto kind = kind_of(argument.real_type());
    if (!kind) continue;
    const auto* alias = argument.alias_info();
    arguments.push_back({static_cast<uint32_t>(i), *kind, alias != nullptr && alias->isWrite()});
    if (return_count == 0 && *kind == Kind::kTensorList && arguments.back().written) list_writer = true;
  }
  for (const auto& value : schema.returns()) {
    int returned = -1;
    const auto* alias = value.alias_info();
    if (alias != nullptr && alias->isWrite()) {
      for (const auto& argument : arguments) {
        if (returned < 0 && argument.written && *schema.arguments()[argument.index].alias_info() == *alias) {
          returned = static_cast<int>(argument.index);
        }
      }
    }
    returned_argument.push_back(returned);
  }
}

void forget_facts(const c10::OperatorHandle& op) {
  auto& known = known_facts();
  std::unique_lock lock(known.mutex);
  known.facts.erase(&op.operator_name());
}

c10::DispatchKeySet native_dispatch_keys(c10::DispatchKeySet keys) {
  using c10::DispatchKey;
  const auto& native = substrate().keys();
  c10::DispatchKeySet result(native.dense);
  if (C10_UNLIKELY(has_special_layout(keys))) {
    if (keys.has(DispatchKey::Sparse)) result = result | c10::DispatchKeySet(native.sparse);
    if (keys.has(DispatchKey::SparseCsr)) result = result | c10::DispatchKeySet(native.sparse_csr);
    if (keys.has(DispatchKey::NestedTensor)) result = result | c10::DispatchKeySet(native.nested);
    if (keys.has(DispatchKey::Quantized)) result = result | c10::DispatchKeySet(native.quantized);
  }
  return result;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  run(facts_of(op), op, keys, stack);
}

void FallbackKernel::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  run(facts_, op, keys, stack);
}

}  // namespace quartz
