// quartz::markov_draft: the sequential part of a drafter with a low-rank Markov head. For step j = 0 ... drafts - 1
//   logits_j = base[:, j] + w1[previous] . w2^T,  previous = sample(logits_j, noise of positions + j),
// in float32, with the noise that the target will draw with at that position. A composition: the product is the
// device's own invariant one, the draw is quartz::sample. Nothing waits for the device.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::markov_draft";

using Optional = const std::optional<at::Tensor>&;
using Sampled = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Sampled sample(const at::Tensor& logits, Optional temperature, Optional top_k, Optional top_p, Optional min_p,
               Optional seeds, Optional positions, Optional sample_indices) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("quartz::sample", "")
                             .typed<Sampled(const at::Tensor&, Optional, Optional, Optional, Optional, Optional,
                                            Optional, Optional, Optional, Optional, Optional, Optional, Optional,
                                            Optional, Optional, Optional, Optional, Optional, bool, int64_t)>();
  const std::optional<at::Tensor> none;
  return op.call(logits, temperature, top_k, top_p, min_p, seeds, positions, sample_indices, none, none, none, none,
                 none, none, none, none, none, none, /*logprobs=*/false, /*top_n=*/0);
}

std::tuple<at::Tensor, at::Tensor> markov_draft(const at::Tensor& base, const at::Tensor& w1, const at::Tensor& w2,
                                                const at::Tensor& previous, Optional temperature, Optional top_k,
                                                Optional top_p, Optional min_p, Optional seeds, Optional positions,
                                                Optional sample_indices) {
  check_same_device(kName, {{"base", base}, {"w1", w1}, {"w2", w2}, {"previous", previous}});
  QUARTZ_CHECK_ARGUMENT(base.dim() == 3 && has_kernel_dtype(base), kName, "base",
                        "be floating, of shape (requests, drafts, vocabulary)", base.scalar_type(), " ", base.sizes());
  const int64_t requests = base.size(0), drafts = base.size(1), vocabulary = base.size(2);
  QUARTZ_CHECK_ARGUMENT(w1.dim() == 2 && w1.size(0) == vocabulary && has_kernel_dtype(w1), kName, "w1",
                        "be floating, of shape (vocabulary, rank)", w1.scalar_type(), " ", w1.sizes());
  QUARTZ_CHECK_ARGUMENT(w2.sizes() == w1.sizes() && w2.scalar_type() == w1.scalar_type(), kName, "w2",
                        "have the shape and dtype of w1", w2.scalar_type(), " ", w2.sizes());
  QUARTZ_CHECK_ARGUMENT(
      previous.dim() == 1 && previous.size(0) == requests && at::isIntegralType(previous.scalar_type(), false), kName,
      "previous", "have one token for each request", previous.scalar_type(), " ", previous.sizes());
  const c10::DeviceGuard guard(base.device());
  const auto ids = base.options().dtype(at::kLong);
  auto tokens = at::empty({requests, drafts}, ids);
  auto logits = at::empty({requests, drafts, vocabulary}, base.options().dtype(at::kFloat));
  const auto first = positions && positions->defined() ? positions->to(at::kLong) : at::full({requests}, 0, ids);
  auto before = previous.to(at::kLong);
  for (int64_t j = 0; j < drafts; ++j) {
    // A request in which nothing could be drawn (-1) goes on from token 0; its drafts are rejected.
    const auto state = w1.index_select(0, before.clamp(0, vocabulary - 1));
    auto step = logits.select(1, j);
    step.copy_(base.select(1, j)).add_(at::mm(state, w2.t()));
    before = std::get<0>(sample(step, temperature, top_k, top_p, min_p, seeds, first.add(j), sample_indices));
    tokens.select(1, j).copy_(before);
  }
  return {tokens, logits};
}

}  // namespace

QUARTZ_OPERATORS(markov_draft) {
  operators.define(
      "markov_draft(Tensor base, Tensor w1, Tensor w2, Tensor previous, Tensor? temperature=None, Tensor? top_k=None, "
      "Tensor? top_p=None, Tensor? min_p=None, Tensor? seeds=None, Tensor? positions=None, "
      "Tensor? sample_indices=None) -> (Tensor tokens, Tensor logits)");
  operators.implement<&markov_draft>("markov_draft");
}

}  // namespace quartz
