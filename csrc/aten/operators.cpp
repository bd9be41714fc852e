#include "aten/operators.h"

#include "aten/registration.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

std::vector<void (*)(Operators&)>& files() {
  static auto* all = new std::vector<void (*)(Operators&)>;
  return *all;
}

torch::Library& definitions() {  // a FRAGMENT: an author may add operators to the namespace too
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "quartz", std::nullopt, __FILE__, __LINE__);
  return *library;
}

}  // namespace

Operators::Operators()
    : definitions_(definitions()),
      on_quartz_(permanent_library("quartz", c10::DispatchKey::PrivateUse1)),
      aten_(permanent_library("aten", c10::DispatchKey::PrivateUse1)) {
  native_.push_back(&permanent_library("quartz", c10::DispatchKey::CPU));
#if QUARTZ_WITH_CUDA
  native_.push_back(&permanent_library("quartz", c10::DispatchKey::CUDA));
#endif
}

void Operators::define(const char* schema) { definitions_.def(schema, {at::Tag::pt2_compliant_tag}); }

OperatorFile::OperatorFile(void (*body)(Operators&)) { files().push_back(body); }

void register_operator_files() {
  Operators operators;
  for (auto* body : files()) body(operators);
}

}  // namespace quartz
