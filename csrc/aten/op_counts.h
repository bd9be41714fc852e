// How often each operator ran an own kernel of quartz, and how often the native device's through the fallback.
#pragma once

#include <ATen/core/operator_name.h>
#include <atomic>
#include <map>
#include <string>
#include <utility>

#include "runtime/export.h"

namespace quartz {

struct OpCounter {
  std::string name;                                     // "aten::add.Tensor"
  std::atomic<uint64_t> own{0}, fallback{0}, exact{0};  // exact: of those through the fallback, on integers alone

  void count_own() { own.fetch_add(1, std::memory_order_relaxed); }
  void count_fallback() { fallback.fetch_add(1, std::memory_order_relaxed); }
  void count_exact() { exact.fetch_add(1, std::memory_order_relaxed); }
};

// The counter of an operator, made at the first call. The reference stays valid until the process ends.
QUARTZ_API OpCounter& op_counter(const std::string& name);

std::string full_name(const c10::OperatorName& name);

// Operators with at least one call since the last reset: name -> (own, fallback).
QUARTZ_API std::map<std::string, std::pair<uint64_t, uint64_t>> op_counts();
// Of them, the calls through the fallback whose tensors, arguments and results, were all integers or bools: no order of
// arithmetic can change what they give.
QUARTZ_API std::map<std::string, uint64_t> exact_op_counts();
QUARTZ_API void reset_op_counts();

}  // namespace quartz
