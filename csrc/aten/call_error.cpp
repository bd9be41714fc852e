#include "aten/call_error.h"

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <sstream>

#include "runtime/substrate.h"

namespace quartz {
namespace {

constexpr const char* kMark = "quartz: ";
constexpr std::size_t kElementsShown = 8;  // of a list

bool holds(const c10::IValue& value, const c10::TensorImpl* tensor) {
  const auto any = [tensor](const auto& elements) {
    for (const c10::IValue& element : elements) {
      if (holds(element, tensor)) return true;
    }
    return false;
  };
  if (value.isTensor()) return value.toTensor().unsafeGetTensorImpl() == tensor;
  if (value.isList()) return any(value.toListRef());
  if (value.isTuple()) return any(value.toTupleRef().elements());
  if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) {
      if (holds(entry.value(), tensor)) return true;
    }
  }
  return false;
}

void print(std::ostream& out, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    out << "None";
    return;
  }
  const auto dtype = c10::getDtypeNames(tensor.scalar_type()).first;
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    out << "number (" << dtype << ")";
    return;
  }
  out << tensor.device() << ' ' << dtype;
  if (tensor.is_nested()) {
    out << "[" << tensor.size(0) << ", ...] nested";
    return;
  }
  out << tensor.sizes();
  if (tensor.layout() != c10::kStrided) out << ' ' << tensor.layout();
}

void print(std::ostream& out, const c10::IValue& value) {
  const auto list = [&out](const auto& elements, const char* brackets) {
    std::size_t shown = 0;
    out << brackets[0];
    for (const c10::IValue& element : elements) {
      if (shown != 0) out << ", ";
      if (shown++ == kElementsShown) {
        out << "... " << elements.size() << " in all";
        break;
      }
      print(out, element);
    }
    out << brackets[1];
  };
  if (value.isTensor()) {
    print(out, value.toTensor());
  } else if (value.isList()) {
    list(value.toListRef(), "[]");
  } else if (value.isTuple()) {
    list(value.toTupleRef().elements(), "()");
  } else {
    out << (value.isNone() ? "None" : value.tagKind());
  }
}

}  // namespace

std::string FailedCall::argument_with(const c10::TensorImpl* tensor) const {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (holds(values[i], tensor)) return names[i];
  }
  return {};
}

std::string FailedCall::text() const {
  std::ostringstream out;
  out << op << '(';
  const char* separator = "";
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].isNone()) continue;
    out << separator << names[i] << ": ";
    print(out, values[i]);
    separator = ", ";
  }
  out << ')';
  return out.str();
}

void FailedCall::add_to(c10::Error& error) const {
  for (const auto& context : error.context()) {
    if (context.rfind(kMark, 0) == 0) return;
  }
  std::string call;
  try {
    call = kMark + text();
  } catch (const std::exception&) {
    return;  // the kernel's own error matters more
  }
  // Two entries, since an error puts a single one into its first line, which programs compare.
  error.add_context(std::string("raised by the ") +
                    c10::DeviceTypeName(substrate().native_type(), /*lower_case=*/true) + " kernel of");
  error.add_context(std::move(call));
}

}  // namespace quartz
