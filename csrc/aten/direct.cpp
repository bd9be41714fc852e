// Registration of the fallback by name. The dispatcher prefers a composite kernel to a backend fallback, so an operator
// that has both a native and a composite kernel would run decomposed on quartz: slower, and in other bits than native.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <map>
#include <memory>
#include <unordered_set>

#include "aten/fallback.h"
#include "aten/registration.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

using c10::DispatchKey;

// CompositeExplicitAutograd kernels that call a DispatchStub or test the device type, and so cannot run on quartz.
bool cannot_be_decomposed(const std::string& name) {
  static const std::unordered_set<std::string> names{
      "aten::convolution", "aten::convolution_backward", "aten::_convolution", "aten::conj_physical_",
      "aten::mode",        "aten::kaiser_window",        "aten::ldexp",        "aten::ldexp_"};
  return names.count(name) != 0;
}

bool has_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutogradNestedTensor);
}

bool takes_generator(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    auto type = argument.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (type->kind() == c10::TypeKind::GeneratorType) return true;
  }
  return false;
}

bool wants_direct(const c10::OperatorHandle& op, DispatchKey native, DispatchKey quartz) {
  if (op.hasKernelForDispatchKey(quartz)) return false;
  const bool dense = quartz == DispatchKey::PrivateUse1;
  const bool has_native = op.hasKernelForDispatchKey(native);
  const bool structured = dense && op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
  const bool wanted = structured || (has_native && (has_composite(op) || !dense)) ||
                      (dense && cannot_be_decomposed(op.operator_name().name));
  if (!wanted) return false;
  // Random operators without a generator argument (rand_like ...) would draw from the CPU's default generator;
  // decomposed they reach one that takes ours. On cuda both are the same generator.
  return substrate().is_cuda() || !dense || !op.hasTag(at::Tag::nondeterministic_seeded) ||
         takes_generator(op.schema());
}

class Listener final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& op) override { forget_facts(op); }
};

}  // namespace

int register_direct() {
  const auto& native = substrate().keys();
  const std::pair<DispatchKey, DispatchKey> pairs[] = {
      {native.dense, DispatchKey::PrivateUse1},
      {native.sparse, DispatchKey::SparsePrivateUse1},
      {native.sparse_csr, DispatchKey::SparseCsrPrivateUse1},
      {native.nested, DispatchKey::NestedTensorPrivateUse1},
      {native.quantized, DispatchKey::QuantizedPrivateUse1},
  };
  auto& dispatcher = c10::Dispatcher::singleton();
  int count = 0;
  for (const auto& [from, to] : pairs) {
    std::map<std::string, torch::Library*> libraries;  // one a namespace
    for (const auto& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      const auto separator = name.name.find("::");
      if (!op || separator == std::string::npos || !wants_direct(*op, from, to)) continue;
      const auto space = name.name.substr(0, separator);
      auto*& library = libraries[space];
      if (library == nullptr) library = &permanent_library(space, to);
      library->impl(full_name(name).substr(separator + 2).c_str(),
                    torch::CppFunction::makeFromBoxedFunctor(std::make_unique<FallbackKernel>(op->schema())));
      ++count;
    }
  }
  return count;
}

void register_fallback() {
  for (auto key : {DispatchKey::PrivateUse1, DispatchKey::SparsePrivateUse1, DispatchKey::SparseCsrPrivateUse1,
                   DispatchKey::NestedTensorPrivateUse1, DispatchKey::QuantizedPrivateUse1}) {
    permanent_library("_", key).fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  // Leaked on purpose; "used" keeps the pointer, by which a leak checker finds it.
  [[gnu::used]] static auto* listener = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>()));
}

}  // namespace quartz
