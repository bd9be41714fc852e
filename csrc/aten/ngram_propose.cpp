// quartz::ngram_propose; the rule in kernels/ngram_propose.h.
#include "kernels/ngram_propose.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::ngram_propose";

std::tuple<at::Tensor, at::Tensor> ngram_propose(const at::Tensor& tokens, int64_t drafts, int64_t shortest,
                                                 int64_t longest, const std::optional<at::Tensor>& lengths,
                                                 bool earliest) {
  const auto used = lengths.value_or(at::Tensor());
  check_same_device(kName, {{"tokens", tokens}, {"lengths", used}});
  QUARTZ_CHECK_ARGUMENT(tokens.dim() == 2 && at::isIntegralType(tokens.scalar_type(), false), kName, "tokens",
                        "be integer, of shape (rows, width)", tokens.scalar_type(), " ", tokens.sizes());
  const int64_t rows = tokens.size(0);
  QUARTZ_CHECK_ARGUMENT(
      !used.defined() || (used.dim() == 1 && used.size(0) == rows && at::isIntegralType(used.scalar_type(), false)),
      kName, "lengths", "have one integer for each row", used.sizes());
  QUARTZ_CHECK_ARGUMENT(drafts >= 0, kName, "drafts", "be at least 0", drafts);
  QUARTZ_CHECK_ARGUMENT(shortest >= 1, kName, "shortest", "be at least 1", shortest);
  QUARTZ_CHECK_ARGUMENT(longest >= shortest && longest < (int64_t{1} << 20), kName, "longest",
                        "be from shortest to 2^20 - 1", longest);
  const auto all = tokens.to(at::kLong).contiguous();
  const auto counted = used.defined() ? used.to(at::kLong).contiguous() : at::Tensor();

  const c10::DeviceGuard guard(all.device());
  const auto proposed = at::empty({rows, drafts}, all.options()), counts = at::empty({rows}, all.options());
  if (rows == 0) return {proposed, counts};
  kernels::NgramPropose a{};
  a.tokens = all.const_data_ptr<int64_t>();
  if (counted.defined()) a.lengths = counted.const_data_ptr<int64_t>();
  a.rows = rows;
  a.width = all.size(1);
  a.shortest = shortest;
  a.longest = longest;
  a.drafts = drafts;
  a.earliest = earliest;
  a.proposed = proposed.mutable_data_ptr<int64_t>();
  a.counts = counts.mutable_data_ptr<int64_t>();
  QUARTZ_RUN_KERNEL(ngram_propose, all, a);
  return {proposed, counts};
}

}  // namespace

QUARTZ_OPERATORS(ngram_propose) {
  operators.define(
      "ngram_propose(Tensor tokens, int drafts, int shortest=1, int longest=4, Tensor? lengths=None, "
      "bool earliest=False) -> (Tensor proposed, Tensor counts)");
  operators.implement<&ngram_propose>("ngram_propose");
}

}  // namespace quartz
