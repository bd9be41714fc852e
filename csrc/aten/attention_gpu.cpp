// Attention in the memory of a GPU: which kernel, its plan and its workspace.
#include "aten/attention_gpu.h"

#if QUARTZ_WITH_CUDA
#include <ATen/ops/empty.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <list>
#include <mutex>

#include "aten/kernel_support.h"
#include "kernels/attention_cuda.h"

namespace quartz {
namespace {

namespace gpu = kernels::cuda;

at::Tensor words_like(const at::Tensor& on, int64_t count) {
  return at::empty({count}, at::TensorOptions().device(on.device()).dtype(at::kInt));
}
at::Tensor bytes_like(const at::Tensor& on, int64_t size) {
  return at::empty({size}, at::TensorOptions().device(on.device()).dtype(at::kByte));
}
int32_t* words_of(const at::Tensor& words) { return words.mutable_data_ptr<int32_t>(); }

at::Tensor new_plan(const gpu::AttentionPlan& plan, const at::Tensor& on, void* stream) {
  auto words = words_like(on, plan.room.words());
  gpu::make_attention_plan(plan, words_of(words), stream);
  return words;
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) == cudaSuccess &&
         status != cudaStreamCaptureStatusNone;
}

// The plans of the last dense calls: every layer of a model asks for the same. One stream uses a plan at a time.
class DensePlans {
 public:
  at::Tensor get(const gpu::AttentionPlan& plan, const at::Tensor& on, void* stream) {
    // A graph keeps the address beyond the plan's time here; and what it allocates must not be used outside.
    if (is_capturing(stream)) return new_plan(plan, on, stream);
    const std::lock_guard lock(mutex_);
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (entry->stream == stream && entry->device == on.device() && same(entry->input, plan.input)) {
        entries_.splice(entries_.begin(), entries_, entry);
        return entry->words;
      }
    }
    if (entries_.size() >= kMost) entries_.pop_back();
    entries_.push_front({plan.input, stream, on.device(), new_plan(plan, on, stream)});
    return entries_.front().words;
  }

 private:
  struct Entry {
    kernels::AttentionPlanInput input;
    void* stream;
    c10::Device device;
    at::Tensor words;
  };
  static bool same(const kernels::AttentionPlanInput& a, const kernels::AttentionPlanInput& b) {
    const auto key = [](const kernels::AttentionPlanInput& i) {
      return std::make_tuple(i.sequences, i.queries, i.keys, i.query_offset, i.group, i.heads, i.window, i.processors,
                             i.causal, i.wide_allowed, i.wide_always);
    };
    return key(a) == key(b);
  }

  static constexpr size_t kMost = 16;
  std::mutex mutex_;
  std::list<Entry> entries_;
};

DensePlans& dense_plans() {
  static auto* const plans = new DensePlans;  // never destroyed: the driver may be gone before
  return *plans;
}

}  // namespace

void run_gpu_attention(const kernels::Attention& a, const at::Tensor& on, const PagedCall& paged) {
  void* const stream = current_gpu_stream(on);
  gpu::AttentionExtras extras;
  extras.blocks = paged.blocks;
  extras.most_queries = paged.most_queries;
  if (gpu::tile_attention_unsupported(a) != nullptr) return gpu::general_attention(a, extras.blocks, stream);
  if (a.queries == 0 || a.heads == 0) return;
  const auto plan = gpu::prepare_attention(a, extras);
  at::Tensor words;
  if (paged.plan.defined() && paged.plan.numel() > 0) {
    words = paged.plan;
    QUARTZ_CHECK_ARGUMENT(
        words.scalar_type() == at::kInt && words.is_contiguous() && words.numel() == plan.room.words(),
        "quartz::paged_attention", "plan",
        "be made by quartz::attention_plan for the same shapes and options: " + std::to_string(plan.room.words()) +
            " words",
        words.numel());
  } else {
    const bool by_shape = a.query_starts.data == nullptr && a.key_begin.data == nullptr && a.key_end.data == nullptr;
    words = by_shape ? dense_plans().get(plan, on, stream) : new_plan(plan, on, stream);
  }
  const auto workspace = bytes_like(on, gpu::attention_workspace(plan, a.head_size, a.value_size));
  gpu::tile_attention(a, extras, plan, words_of(words), workspace.mutable_data_ptr(), stream);
}

at::Tensor make_gpu_attention_plan(const kernels::Attention& a, const at::Tensor& on, int64_t most_queries) {
  gpu::AttentionExtras extras;
  extras.most_queries = most_queries;
  return new_plan(gpu::prepare_attention(a, extras), on, current_gpu_stream(on));
}

void run_gpu_write_kv(const kernels::WriteKv& key, const kernels::WriteKv* value, int64_t blocks,
                      const at::Tensor& on) {
  gpu::write_kv(key, value, blocks, current_gpu_stream(on));
}

}  // namespace quartz
#endif
