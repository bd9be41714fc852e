// quartz::sample; the steps and their arithmetic in kernels/sample.h.
#include "kernels/sample.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>

#include <deque>

#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"

namespace quartz {
namespace {

constexpr const char* kName = "quartz::sample";

// The optional arguments: checked, converted where they have another type, kept until the kernel has its pointers.
class RowArguments {
 public:
  RowArguments(const at::Tensor& logits) : logits_(logits) {}

  template <class T>
  const T* one_a_row(const char* name, const std::optional<at::Tensor>& tensor) {
    if (!tensor || !tensor->defined()) return nullptr;
    QUARTZ_CHECK_ARGUMENT(tensor->dim() == 1 && tensor->size(0) == logits_.size(0), kName, name,
                          "have one value for each row of logits", tensor->sizes());
    return keep<T>(name, *tensor);
  }
  // (rows, width), with contiguous rows.
  template <class T>
  const T* table(const char* name, const std::optional<at::Tensor>& tensor, int64_t rows, int64_t width,
                 const char* rule) {
    if (!tensor || !tensor->defined()) return nullptr;
    QUARTZ_CHECK_ARGUMENT(
        tensor->dim() == 2 && (rows < 0 || tensor->size(0) == rows) && (width < 0 || tensor->size(1) == width), kName,
        name, rule, tensor->sizes());
    return keep<T>(name, *tensor);
  }
  // int32 tables are not converted: they are large, and live as long as the requests.
  void check_int32(const char* name, const std::optional<at::Tensor>& tensor) {
    if (!tensor || !tensor->defined()) return;
    QUARTZ_CHECK_ARGUMENT(tensor->scalar_type() == at::kInt, kName, name, "be int32", tensor->scalar_type());
  }

 private:
  template <class T>
  const T* keep(const char* name, const at::Tensor& tensor) {
    check_same_device(kName, {{"logits", logits_}, {name, tensor}});
    QUARTZ_CHECK_ARGUMENT(at::isFloatingType(tensor.scalar_type()) == std::is_floating_point_v<T> &&
                              !tensor.is_complex() && tensor.scalar_type() != at::kBool,
                          kName, name, std::is_floating_point_v<T> ? "be floating" : "be integer",
                          tensor.scalar_type());
    kept_.push_back(tensor.to(c10::CppTypeToScalarType<T>::value).contiguous());
    return kept_.back().template const_data_ptr<T>();
  }

  const at::Tensor& logits_;
  std::deque<at::Tensor> kept_;
};

using Optional = const std::optional<at::Tensor>&;

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> sample(
    const at::Tensor& logits, Optional temperature, Optional top_k, Optional top_p, Optional min_p, Optional seeds,
    Optional positions, Optional sample_indices, Optional bitmask, Optional bias_ids, Optional bias_values,
    Optional repetition_penalty, Optional frequency_penalty, Optional presence_penalty, Optional counts,
    Optional prompt_mask, Optional slots, Optional pending, bool logprobs, int64_t top_n) {
  QUARTZ_CHECK_ARGUMENT(logits.dim() == 2, kName, "logits", "have the shape (rows, vocabulary)", logits.sizes());
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(logits), kName, "logits", "be float32, float16 or bfloat16",
                        logits.scalar_type());
  const int64_t rows = logits.size(0), vocabulary = logits.size(1), words = (vocabulary + 31) / 32;
  QUARTZ_CHECK_ARGUMENT(vocabulary >= 1 && vocabulary < kernels::kMaxSampleVocabulary, kName, "logits",
                        "have 1 to 2^24 - 1 columns", vocabulary);
  QUARTZ_CHECK_ARGUMENT(top_n >= 0 && top_n <= kernels::kMaxTopLogprobs, kName, "top_n", "be from 0 to 256", top_n);
  const auto contiguous = with_dense_rows(logits);
  RowArguments arguments(logits);
  kernels::Sample a{};
  a.logits = contiguous.const_data_ptr();
  a.dtype = kernel_dtype(logits);
  a.rows = rows;
  a.vocabulary = vocabulary;
  a.stride = contiguous.stride(0);
  a.temperature = arguments.one_a_row<float>("temperature", temperature);
  a.top_p = arguments.one_a_row<float>("top_p", top_p);
  a.min_p = arguments.one_a_row<float>("min_p", min_p);
  a.repetition = arguments.one_a_row<float>("repetition_penalty", repetition_penalty);
  a.frequency = arguments.one_a_row<float>("frequency_penalty", frequency_penalty);
  a.presence = arguments.one_a_row<float>("presence_penalty", presence_penalty);
  a.top_k = arguments.one_a_row<int64_t>("top_k", top_k);
  a.seeds = arguments.one_a_row<int64_t>("seeds", seeds);
  a.positions = arguments.one_a_row<int64_t>("positions", positions);
  a.samples = arguments.one_a_row<int64_t>("sample_indices", sample_indices);
  arguments.check_int32("bitmask", bitmask);
  a.bitmask = arguments.table<int32_t>("bitmask", bitmask, rows, words, "have the shape (rows, ceil(vocabulary / 32))");
  a.bitmask_stride = words;
  QUARTZ_CHECK_ARGUMENT((bias_ids && bias_ids->defined()) == (bias_values && bias_values->defined()), kName, "bias_ids",
                        "be given with bias_values", "one of them");
  a.bias_ids = arguments.table<int64_t>("bias_ids", bias_ids, rows, -1, "have the shape (rows, entries)");
  if (a.bias_ids != nullptr) {
    a.bias_width = bias_ids->size(1);
    a.bias_values =
        arguments.table<float>("bias_values", bias_values, rows, a.bias_width, "have the shape of bias_ids");
  }
  a.pending = arguments.table<int64_t>("pending", pending, rows, -1, "have the shape (rows, tokens)");
  if (a.pending != nullptr) a.pending_width = pending->size(1);
  arguments.check_int32("counts", counts);
  arguments.check_int32("prompt_mask", prompt_mask);
  a.slots = arguments.one_a_row<int64_t>("slots", slots);
  const int64_t any = -1, state_rows = a.slots != nullptr ? any : rows;
  a.counts = arguments.table<int32_t>("counts", counts, state_rows, vocabulary,
                                      "have the shape (rows, vocabulary), or (slots, vocabulary) where slots is given");
  a.slot_count = a.counts != nullptr ? counts->size(0) : state_rows;
  a.prompt_mask = arguments.table<int32_t>("prompt_mask", prompt_mask, a.slot_count, words,
                                           "have the rows of counts and ceil(vocabulary / 32) columns");
  if (a.prompt_mask != nullptr) a.slot_count = prompt_mask->size(0);
  a.counts_stride = vocabulary;
  a.prompt_stride = words;

  const c10::DeviceGuard guard(logits.device());
  const auto ids = logits.options().dtype(at::kLong), numbers = logits.options().dtype(at::kFloat);
  auto tokens = at::empty({rows}, ids);
  auto raw_logprobs = at::empty({logprobs ? rows : 0}, numbers), own_logprobs = at::empty_like(raw_logprobs);
  auto top_ids = at::empty({rows, top_n}, ids), top_logprobs = at::empty({rows, top_n}, numbers);
  a.tokens = tokens.mutable_data_ptr<int64_t>();
  if (logprobs) {
    a.raw_logprobs = raw_logprobs.mutable_data_ptr<float>();
    a.logprobs = own_logprobs.mutable_data_ptr<float>();
  }
  a.top_n = top_n;
  if (top_n > 0) {
    a.top_ids = top_ids.mutable_data_ptr<int64_t>();
    a.top_logprobs = top_logprobs.mutable_data_ptr<float>();
  }
  if (rows > 0) {
#if QUARTZ_WITH_CUDA
    if (on_gpu(logits)) {
      const auto workspace =
          at::empty({kernels::cuda::sample_workspace(rows, vocabulary)}, logits.options().dtype(at::kByte));
      a.workspace = workspace.mutable_data_ptr();
      kernels::cuda::sample(a, current_gpu_stream(logits));
      return {tokens, raw_logprobs, own_logprobs, top_ids, top_logprobs};
    }
#endif
    kernels::cpu::sample(a, at_parallel());
  }
  return {tokens, raw_logprobs, own_logprobs, top_ids, top_logprobs};
}

}  // namespace

QUARTZ_OPERATORS(sample) {
  operators.define(
      "sample(Tensor logits, Tensor? temperature=None, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None, "
      "Tensor? seeds=None, Tensor? positions=None, Tensor? sample_indices=None, Tensor? bitmask=None, "
      "Tensor? bias_ids=None, Tensor? bias_values=None, Tensor? repetition_penalty=None, "
      "Tensor? frequency_penalty=None, Tensor? presence_penalty=None, Tensor? counts=None, Tensor? prompt_mask=None, "
      "Tensor? slots=None, Tensor? pending=None, bool logprobs=True, int top_n=0) "
      "-> (Tensor tokens, Tensor raw_logprobs, Tensor logprobs, Tensor top_ids, Tensor top_logprobs)");
  operators.implement<&sample>("sample");
}

}  // namespace quartz
