#include "aten/op_counts.h"

#include <memory>
#include <mutex>

namespace quartz {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<OpCounter>> counters;
};

Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

}  // namespace

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

OpCounter& op_counter(const std::string& name) {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  auto& counter = all.counters[name];
  if (!counter) {
    counter = std::make_unique<OpCounter>();
    counter->name = name;
  }
  return *counter;
}

std::map<std::string, std::pair<uint64_t, uint64_t>> op_counts() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::map<std::string, std::pair<uint64_t, uint64_t>> result;
  for (const auto& [name, counter] : all.counters) {
    const uint64_t own = counter->own.load(), fallback = counter->fallback.load();
    if (own + fallback != 0) result[name] = {own, fallback};
  }
  return result;
}

std::map<std::string, uint64_t> exact_op_counts() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  std::map<std::string, uint64_t> result;
  for (const auto& [name, counter] : all.counters) {
    if (const uint64_t exact = counter->exact.load(); exact != 0) result[name] = exact;
  }
  return result;
}

void reset_op_counts() {
  auto& all = registry();
  const std::lock_guard lock(all.mutex);
  for (auto& [name, counter] : all.counters) {
    counter->own.store(0);
    counter->fallback.store(0);
    counter->exact.store(0);
  }
}

}  // namespace quartz
