// quartz::moe_topk; formula and order of arithmetic in kernels/moe_topk.h.
#include "kernels/moe_topk.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/kernel_support.h"
#include "aten/operators.h"

namespace quartz {
namespace {

constexpr const char* kOp = "quartz::moe_topk";

kernels::Scoring scoring_of(c10::string_view name) {
  if (name == "softmax") return kernels::Scoring::kSoftmax;
  if (name == "sigmoid") return kernels::Scoring::kSigmoid;
  if (name == "sqrt_softplus") return kernels::Scoring::kSqrtSoftplus;
  if (name == "softmax_selected") return kernels::Scoring::kSoftmaxSelected;
  TORCH_CHECK_VALUE(false, kOp, ": scoring must be 'softmax', 'sigmoid', 'sqrt_softplus' or 'softmax_selected', got '",
                    name, "'");
}

kernels::GroupScore group_score_of(c10::string_view name) {
  if (name == "max") return kernels::GroupScore::kMax;
  if (name == "sum_of_two") return kernels::GroupScore::kSumOfTwo;
  TORCH_CHECK_VALUE(false, kOp, ": group_score must be 'max' or 'sum_of_two', got '", name, "'");
}

std::tuple<at::Tensor, at::Tensor> moe_topk(const at::Tensor& logits, int64_t k, c10::string_view scoring,
                                            const std::optional<at::Tensor>& bias, int64_t groups, int64_t kept_groups,
                                            c10::string_view group_score, bool renormalise, double epsilon,
                                            double scale, const std::optional<at::Tensor>& ids) {
  const at::Tensor bias_tensor = bias.value_or(at::Tensor()), given = ids.value_or(at::Tensor());
  check_same_device(kOp, {{"logits", logits}, {"bias", bias_tensor}, {"ids", given}});
  QUARTZ_CHECK_ARGUMENT(logits.dim() == 2, kOp, "logits", "have shape [tokens, experts]", logits.sizes());
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(logits), kOp, "logits", "be float32, float16 or bfloat16",
                        logits.scalar_type());
  const int64_t rows = logits.size(0), experts = logits.size(1);
  QUARTZ_CHECK_ARGUMENT(experts >= 1 && experts <= kernels::kMaxExperts, kOp, "logits", "have 1 to 1024 experts",
                        experts);
  QUARTZ_CHECK_ARGUMENT(k >= 1 && k <= kernels::kMaxSelected, kOp, "k", "be from 1 to 64", k);
  QUARTZ_CHECK_ARGUMENT(groups >= 1 && experts % groups == 0, kOp, "groups", "divide the number of experts", groups,
                        " for ", experts);
  QUARTZ_CHECK_ARGUMENT(kept_groups >= 1 && kept_groups <= groups, kOp, "kept_groups", "be from 1 to groups",
                        kept_groups);
  QUARTZ_CHECK_ARGUMENT(given.defined() || k <= experts / groups * kept_groups, kOp, "k",
                        "be at most the number of experts in the kept groups", k, " for ",
                        experts / groups * kept_groups);
  if (bias_tensor.defined()) {
    QUARTZ_CHECK_ARGUMENT(bias_tensor.dim() == 1 && bias_tensor.size(0) == experts, kOp, "bias",
                          "have one element for each expert", bias_tensor.sizes(), " for ", experts);
    QUARTZ_CHECK_ARGUMENT(bias_tensor.scalar_type() == at::kFloat, kOp, "bias", "be float32",
                          bias_tensor.scalar_type());
  }
  if (given.defined()) {
    QUARTZ_CHECK_ARGUMENT(given.dim() == 2 && given.size(0) == rows && given.size(1) == k, kOp, "ids",
                          "have shape [tokens, k]", given.sizes());
    QUARTZ_CHECK_ARGUMENT(given.scalar_type() == at::kLong, kOp, "ids", "be int64", given.scalar_type());
  }
  const c10::DeviceGuard guard(logits.device());
  auto weights = at::empty({rows, k}, logits.options().dtype(at::kFloat));
  auto chosen = at::empty({rows, k}, logits.options().dtype(at::kLong));
  kernels::MoeTopk arguments{};
  arguments.scoring = scoring_of(scoring);
  arguments.group_score = group_score_of(group_score);
  if (rows == 0) return {weights, chosen};

  const auto dense = with_dense_rows(logits);
  const auto dense_bias = bias_tensor.defined() ? bias_tensor.contiguous() : at::Tensor();
  const auto dense_given = given.defined() ? given.contiguous() : at::Tensor();
  arguments.logits = dense.const_data_ptr();
  arguments.stride = dense.stride(0);
  if (dense_bias.defined()) arguments.bias = dense_bias.const_data_ptr<float>();
  if (dense_given.defined()) arguments.given = dense_given.const_data_ptr<int64_t>();
  arguments.ids = chosen.mutable_data_ptr<int64_t>();
  arguments.weights = weights.mutable_data_ptr<float>();
  arguments.rows = rows;
  arguments.experts = experts;
  arguments.k = k;
  arguments.groups = groups;
  arguments.kept_groups = kept_groups;
  arguments.renormalise = renormalise;
  arguments.epsilon = static_cast<float>(epsilon);
  arguments.scale = static_cast<float>(scale);
  arguments.dtype = kernel_dtype(dense);
  QUARTZ_RUN_KERNEL(moe_topk, logits, arguments);
  return {weights, chosen};
}

}  // namespace

QUARTZ_OPERATORS(moe_topk) {
  operators.define(
      "moe_topk(Tensor logits, int k, str scoring='softmax', Tensor? bias=None, int groups=1, int kept_groups=1, "
      "str group_score='sum_of_two', bool renormalise=True, float epsilon=0., float scale=1., Tensor? ids=None) -> "
      "(Tensor, Tensor)");
  operators.implement<&moe_topk>("moe_topk");
}

}  // namespace quartz
