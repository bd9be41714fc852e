// quartz::spec_verify; the rule in kernels/spec_verify.h.
#include "kernels/spec_verify.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::spec_verify";

at::Tensor integers(const char* name, const at::Tensor& tensor) {
  QUARTZ_CHECK_ARGUMENT(at::isIntegralType(tensor.scalar_type(), false), kName, name, "be integer",
                        tensor.scalar_type());
  return tensor.to(at::kLong).contiguous();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> spec_verify(
    const at::Tensor& target_tokens, const at::Tensor& draft_tokens, const at::Tensor& cu_drafts,
    const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& end_tokens) {
  const auto first_positions = positions.value_or(at::Tensor()), ends = end_tokens.value_or(at::Tensor());
  check_same_device(kName, {{"target_tokens", target_tokens},
                            {"draft_tokens", draft_tokens},
                            {"cu_drafts", cu_drafts},
                            {"positions", first_positions},
                            {"end_tokens", ends}});
  QUARTZ_CHECK_ARGUMENT(cu_drafts.dim() == 1 && cu_drafts.size(0) >= 1, kName, "cu_drafts",
                        "have the shape (requests + 1,)", cu_drafts.sizes());
  QUARTZ_CHECK_ARGUMENT(draft_tokens.dim() == 1, kName, "draft_tokens", "have one dimension", draft_tokens.sizes());
  const int64_t requests = cu_drafts.size(0) - 1, drafts = draft_tokens.size(0);
  QUARTZ_CHECK_ARGUMENT(target_tokens.dim() == 1 && target_tokens.size(0) == drafts + requests, kName, "target_tokens",
                        "have one token for each draft and one more for each request", target_tokens.sizes(), " with ",
                        drafts, " drafts and ", requests, " requests");
  QUARTZ_CHECK_ARGUMENT(
      !first_positions.defined() || (first_positions.dim() == 1 && first_positions.size(0) == requests), kName,
      "positions", "have one value for each request", first_positions.sizes());
  QUARTZ_CHECK_ARGUMENT(!ends.defined() || (ends.dim() == 2 && ends.size(0) == requests), kName, "end_tokens",
                        "have the shape (requests, tokens)", ends.sizes());
  const auto target = integers("target_tokens", target_tokens), draft = integers("draft_tokens", draft_tokens);
  const auto bounds = integers("cu_drafts", cu_drafts);
  const auto start = first_positions.defined() ? integers("positions", first_positions) : at::Tensor();
  const auto end = ends.defined() ? integers("end_tokens", ends) : at::Tensor();

  const c10::DeviceGuard guard(target.device());
  const auto accepted = at::empty({requests}, target.options());
  const auto committed = at::empty_like(accepted), next_tokens = at::empty_like(accepted);
  const auto next_positions = at::empty_like(accepted), tokens = at::full({drafts + requests}, -1, target.options());
  kernels::SpecVerify a{};
  a.target_tokens = target.const_data_ptr<int64_t>();
  a.draft_tokens = draft.const_data_ptr<int64_t>();
  a.cu_drafts = bounds.const_data_ptr<int64_t>();
  if (start.defined()) a.positions = start.const_data_ptr<int64_t>();
  if (end.defined()) {
    a.end_tokens = end.const_data_ptr<int64_t>();
    a.end_width = end.size(1);
  }
  a.requests = requests;
  a.drafts = drafts;
  a.accepted = accepted.mutable_data_ptr<int64_t>();
  a.committed = committed.mutable_data_ptr<int64_t>();
  a.next_tokens = next_tokens.mutable_data_ptr<int64_t>();
  a.next_positions = next_positions.mutable_data_ptr<int64_t>();
  a.tokens = tokens.mutable_data_ptr<int64_t>();
  if (requests > 0) {
    QUARTZ_RUN_KERNEL(spec_verify, target, a);
  }
  return {accepted, committed, next_tokens, next_positions, tokens};
}

}  // namespace

QUARTZ_OPERATORS(spec_verify) {
  operators.define(
      "spec_verify(Tensor target_tokens, Tensor draft_tokens, Tensor cu_drafts, Tensor? positions=None, "
      "Tensor? end_tokens=None) "
      "-> (Tensor accepted, Tensor committed, Tensor next_tokens, Tensor next_positions, Tensor tokens)");
  operators.implement<&spec_verify>("spec_verify");
}

}  // namespace quartz
