#include "aten/registration.h"

#include <c10/core/DeviceType.h>

#include <deque>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "runtime/allocator.h"
#include "runtime/graph.h"
#include "runtime/guard.h"
#include "runtime/hooks.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

bool register_everything() {
  choose_cpu_isa();
  substrate();  // a wrong environment variable throws here, before anything is registered
  c10::register_privateuse1_backend("quartz");
  register_guard();
  register_allocator();
  register_hooks();
  register_graphs();

  auto& aten = permanent_library("aten", c10::DispatchKey::PrivateUse1);
  register_factories(aten);
  register_views(aten);
  register_copies(aten);
  register_set(aten);
  register_convolution(aten);
  register_attention(aten);
  register_dropout(aten);
  if (!substrate().is_cuda()) {
    register_recurrent(aten);
    register_histogram(aten);
  }
  register_operator_files();
  register_hot_operators(aten);
  register_direct();
  register_fallback();
  register_autocast();
  return true;
}

// At load, after libtorch's own registrations (libquartz.so depends on libtorch, which is therefore loaded first). An
// exception here would end the process: it is left for the first caller of initialize().
const bool registered = [] {
  try {
    initialize();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}();

}  // namespace

torch::Library& permanent_library(const std::string& space, c10::DispatchKey key, std::source_location where) {
  static auto* all = new std::deque<torch::Library>;  // leaked on purpose, and reachable for a leak checker
  return all->emplace_back(torch::Library::IMPL, space, key, where.file_name(), where.line());
}

void initialize() {
  static const bool done = register_everything();  // a failed attempt is repeated at the next call
  (void)done;
  (void)registered;
}

}  // namespace quartz
