// quartz::spec_schedule; the rule in kernels/spec_schedule.h.
#include "kernels/spec_schedule.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::spec_schedule";

at::Tensor spec_schedule(const at::Tensor& confidences, const at::Tensor& step_times,
                         const std::optional<at::Tensor>& available) {
  const auto counts = available.value_or(at::Tensor());
  check_same_device(kName, {{"confidences", confidences}, {"step_times", step_times}, {"available", counts}});
  QUARTZ_CHECK_ARGUMENT(confidences.dim() == 2 && at::isFloatingType(confidences.scalar_type()), kName, "confidences",
                        "be floating, of shape (requests, drafts)", confidences.scalar_type(), " ",
                        confidences.sizes());
  QUARTZ_CHECK_ARGUMENT(step_times.dim() == 1 && at::isFloatingType(step_times.scalar_type()), kName, "step_times",
                        "be floating, of one dimension", step_times.scalar_type(), " ", step_times.sizes());
  const int64_t requests = confidences.size(0), drafts = confidences.size(1);
  QUARTZ_CHECK_ARGUMENT(requests * drafts <= kernels::kMaxScheduled, kName, "confidences",
                        "have at most 16384 elements", requests * drafts);
  QUARTZ_CHECK_ARGUMENT(!counts.defined() || (counts.dim() == 1 && counts.size(0) == requests &&
                                              at::isIntegralType(counts.scalar_type(), false)),
                        kName, "available", "have one integer for each request", counts.sizes());
  const auto chances = confidences.to(at::kFloat).contiguous(), times = step_times.to(at::kFloat).contiguous();
  const auto limits = counts.defined() ? counts.to(at::kLong).contiguous() : at::Tensor();

  const c10::DeviceGuard guard(chances.device());
  const auto lengths = at::empty({requests}, chances.options().dtype(at::kLong));
  if (requests == 0) return lengths;
  kernels::SpecSchedule a{};
  a.confidences = chances.const_data_ptr<float>();
  if (limits.defined()) a.available = limits.const_data_ptr<int64_t>();
  a.step_times = times.const_data_ptr<float>();
  a.requests = requests;
  a.drafts = drafts;
  a.steps = times.size(0);
  a.lengths = lengths.mutable_data_ptr<int64_t>();
#if QUARTZ_WITH_CUDA
  if (on_gpu(chances)) {
    kernels::cuda::spec_schedule(a, current_gpu_stream(chances));
    return lengths;
  }
#endif
  kernels::cpu::spec_schedule(a);
  return lengths;
}

}  // namespace

QUARTZ_OPERATORS(spec_schedule) {
  operators.define("spec_schedule(Tensor confidences, Tensor step_times, Tensor? available=None) -> Tensor");
  operators.implement<&spec_schedule>("spec_schedule");
}

}  // namespace quartz
