// Two launches a call, three with logprobs: the streaming passes over all rows (sample_streams.cuh), then one cluster
// of blocks a row. Most rows need one block of it or a second look at the logits; those with top-p alone, a large
// top-k, bias or pending tokens go through the cluster's shared memory (sample_whole.cuh).
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "kernels/cuda/sample_streams.cuh"
#include "kernels/cuda/sample_whole.cuh"
#include "kernels/sample.h"

namespace quartz::kernels::cuda {
namespace {

using List = Shortlist<kThreads>;

__device__ TokenNoise noise_of(const Sample& a, int64_t r) {
  return {a.seeds != nullptr ? a.seeds[r] : 0, a.positions != nullptr ? a.positions[r] : 0,
          a.samples != nullptr ? a.samples[r] : 0};
}

// The draw of a short row. False if there are too many candidates for the list.
__device__ bool draw_short(const Sample& a, int64_t r, const RowRules& rules, List& list, int64_t* token) {
  const int64_t in_list = rules.greedy ? 1 : rules.top_k;
  if (!list.find(false, static_cast<int>(has_dense(a) ? in_list : max(in_list, a.top_n)))) return false;
  *token = -1;
  if (list.found() > 0 && rules.greedy) {
    *token = list.id(0);
    if (threadIdx.x == 0 && a.logprobs != nullptr) a.logprobs[r] = 0.0f - log_of_mass(Workspace(a).raw_mass[r]);
  } else if (list.found() > 0) {
    *token = list.draw(rules, noise_of(a, r), a.logprobs != nullptr ? a.logprobs + r : nullptr);
  } else if (threadIdx.x == 0 && a.logprobs != nullptr) {
    a.logprobs[r] = kMinusInfinity;
  }
  return true;
}

// What is wanted of the raw logits of a row of the streaming passes. `listed`: the list has its first tokens already.
__device__ bool finish_raw(const Sample& a, int64_t r, int64_t token, List& list, bool listed) {
  __syncthreads();
  if (!listed && !list.find(true, static_cast<int>(max(a.top_n, int64_t{1})))) return false;
  const bool any = list.found() > 0;
  const float largest = any ? list.value(0) : 0.0f, log_sum = any ? log_of_mass(Workspace(a).raw_mass[r]) : 0.0f;
  if (threadIdx.x == 0 && a.raw_logprobs != nullptr) {
    a.raw_logprobs[r] = any && token >= 0 ? value_of(a, r, token, true) - largest - log_sum : kMinusInfinity;
  }
  for (int64_t i = threadIdx.x; i < a.top_n; i += kThreads) {
    const bool there = i < list.found();
    a.top_ids[r * a.top_n + i] = there ? int64_t{list.id(static_cast<int>(i))} : -1;
    a.top_logprobs[r * a.top_n + i] = there ? list.value(static_cast<int>(i)) - largest - log_sum : kMinusInfinity;
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 2)
    sample_kernel(const __grid_constant__ Sample a, int slice, int cached, int cached_alone) {
  extern __shared__ float4 values[];
  __shared__ Shared shared;
  const cg::cluster_group cluster = cg::this_cluster();
  const int64_t r = blockIdx.x / cluster.num_blocks();
  const RowRules rules(a, r);
  const Way way = way_of(a, rules);
  bool alone = false;
  if (way != Way::kWhole) {
    List list(a, r, *reinterpret_cast<List::Memory*>(values), shared.listed_count, shared.partial[0]);
    int64_t token = -1;
    if (way == Way::kOpen) {
      Row row(a, shared, nullptr, 0, 0, false);
      uint64_t sum = 0;
      token = row.draw_open(rules, noise_of(a, r), a.logprobs != nullptr ? &sum : nullptr);
      if (row.leads() && a.logprobs != nullptr) {
        a.logprobs[r] =
            token < 0 ? kMinusInfinity
                      : scaled(value_of(a, r, token, false), row.largest, rules.inverse_temperature) - log_of_mass(sum);
      }
    }
    if (cluster.block_rank() != 0) return;
    alone = true;
    const bool drawn = way == Way::kOpen || draw_short(a, r, rules, list, &token);
    if (drawn) {
      if (threadIdx.x == 0 && a.tokens != nullptr) a.tokens[r] = token;
      if (!wants_raw(a) || finish_raw(a, r, token, list, way == Way::kShort && !has_dense(a))) return;
    }
    __syncthreads();  // too many candidates: as any other row, but by one block
    slice = static_cast<int>((a.vocabulary + kVector - 1) / kVector * kVector);
    cached = cached_alone;
  }
  Row row(a, shared, reinterpret_cast<float*>(values), slice, cached, alone);
  row.load(false);
  int64_t token = -1;
  if (row.largest > kMinusInfinity) {
    Cut cut;
    token = row.largest_id;
    if (!rules.greedy) {
      if (rules.lowest_z > kMinusInfinity) {
        cut.value = lowest_value(row.largest, rules.inverse_temperature, rules.lowest_z);
      }
      if (rules.top_k == 1) {
        cut = {row.largest, row.largest_id};
      } else if (rules.top_k > 0) {
        cut = row.first(cut, rules.top_k);
      }
      if (rules.top_p < 1.0f) cut = row.nucleus(cut, rules.top_p, rules.inverse_temperature);
      token = row.draw(cut, rules.inverse_temperature, noise_of(a, r));
    }
    if (a.logprobs != nullptr) {
      const float log_sum = log_of_mass(row.mass(cut, rules.inverse_temperature));
      if (row.leads()) {
        a.logprobs[r] = scaled(value_of(a, r, token, false), row.largest, rules.inverse_temperature) - log_sum;
      }
    }
  } else if (a.logprobs != nullptr && row.leads()) {
    a.logprobs[r] = kMinusInfinity;
  }
  if (a.tokens != nullptr && row.leads()) a.tokens[r] = token;

  if (a.raw_logprobs != nullptr || a.top_n > 0) {
    if (has_dense(a) || has_sparse(a)) row.load(true);
    const bool any = row.largest > kMinusInfinity;
    const float log_sum = any ? log_of_mass(row.mass(Cut{}, 1.0f)) : 0.0f;
    if (a.raw_logprobs != nullptr && row.leads()) {
      a.raw_logprobs[r] = any && token >= 0 ? value_of(a, r, token, true) - row.largest - log_sum : kMinusInfinity;
    }
    if (a.top_n > 0) {
      const Cut cut = any ? row.first(Cut{}, a.top_n) : Cut{kLargest, 0};
      row.list(cut, a.top_n, log_sum, a.top_ids + r * a.top_n, a.top_logprobs + r * a.top_n);
    }
  }
  row.leave();
}

// The passes over all chunks: few blocks of many chunks where there are many rows.
template <class T>
void stream_rows(const Sample& a, cudaStream_t stream) {
  const int64_t chunks = Workspace::chunks_of(a.vocabulary);
  const auto pass = [&]<int kChunks>(std::integral_constant<int, kChunks>) {
    const auto blocks = static_cast<int>((chunks + kStreamWarps * kChunks - 1) / (kStreamWarps * kChunks));
    const auto grid = static_cast<unsigned>(a.rows * blocks);
    maxima_kernel<T, kChunks><<<grid, kStreamThreads, 0, stream>>>(a, blocks);
    if (wants_raw(a) || a.logprobs != nullptr)
      raw_mass_kernel<T, kChunks><<<grid, kStreamThreads, 0, stream>>>(a, blocks);
  };
  if (a.rows * chunks > 32 * 1024) {
    pass(std::integral_constant<int, 4>{});
  } else {
    pass(std::integral_constant<int, 1>{});
  }
}

}  // namespace

int64_t sample_workspace(int64_t rows, int64_t vocabulary) { return Workspace::bytes(rows, vocabulary); }

// With a given size of the cluster, for tests and benchmarks.
void sample_with(const Sample& a, int blocks, void* stream) {
  if (a.rows == 0) return;
  if (a.workspace != nullptr && !has_sparse(a)) {
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    switch (a.dtype) {
      case DType::kFloat32:
        stream_rows<float>(a, cuda_stream);
        break;
      case DType::kFloat16:
        stream_rows<Float16>(a, cuda_stream);
        break;
      default:
        stream_rows<BFloat16>(a, cuda_stream);
    }
  }
  const auto slice = static_cast<int>((a.vocabulary + blocks * kVector - 1) / (blocks * kVector)) * kVector;
  int device = 0, memory = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  const int room =
      (memory - static_cast<int>(sizeof(Shared)) - 1024) / static_cast<int>(sizeof(float)) / kVector * kVector;
  const int cached = std::min(slice, room);
  static std::atomic<uint64_t> prepared{0};  // devices whose limits are raised already
  if (const uint64_t bit = uint64_t{1} << (device % 64); (prepared.load() & bit) == 0) {
    cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room * int{sizeof(float)});
    cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    prepared.fetch_or(bit);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(a.rows * blocks));
  config.blockDim = dim3(kThreads);
  const size_t memory_bytes = std::max(static_cast<size_t>(cached) * sizeof(float), sizeof(List::Memory));
  config.dynamicSmemBytes = memory_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = 1;
  cudaLaunchKernelEx(&config, sample_kernel, a, slice, cached, static_cast<int>(memory_bytes / sizeof(float)));
}

void sample(const Sample& a, void* stream) {
  // Small rows need few blocks; 8 is the largest cluster that every GPU with clusters has.
  int blocks = 8;
  while (blocks > 1 && a.vocabulary <= blocks / 2 * kThreads * kVector) blocks /= 2;
  sample_with(a, blocks, stream);
}

}  // namespace quartz::kernels::cuda
