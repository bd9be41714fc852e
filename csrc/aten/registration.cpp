#include "aten/registration.h"

#include <c10/core/DeviceType.h>

#include <deque>
#include <exception>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "runtime/allocator.h"
#include "runtime/graph.h"
#include "runtime/guard.h"
#include "runtime/hooks.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

void register_everything() {
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
  if (substrate().is_cuda()) {
    register_recurrent_cudnn(aten);
    register_fft_half(aten);
    register_jagged(aten);
  } else {
    register_recurrent(aten);
    register_histogram(aten);
  }
  register_operator_files();
  register_hot_operators(aten);
  register_direct();
  register_fallback();
  register_autocast();
}

// Runs once: half of a registration cannot be repeated. What it threw is kept for every caller.
std::exception_ptr register_once() {
  try {
    register_everything();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

const std::exception_ptr& registration_failure() {
  static const auto* failure = new std::exception_ptr(register_once());
  return *failure;
}

// At load, after libtorch's own registrations (libquartz.so depends on libtorch, which is therefore loaded first). An
// exception here would end the process: it is left for the first caller of initialize().
[[maybe_unused]] const bool registered = registration_failure() == nullptr;

}  // namespace

torch::Library& permanent_library(const std::string& space, c10::DispatchKey key, std::source_location where) {
  static auto* all = new std::deque<torch::Library>;  // leaked on purpose, and reachable for a leak checker
  return all->emplace_back(torch::Library::IMPL, space, key, where.file_name(), where.line());
}

void initialize() {
  if (registration_failure() != nullptr) std::rethrow_exception(registration_failure());
}

}  // namespace quartz
