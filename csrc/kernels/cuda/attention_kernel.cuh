// The attention kernel. One producer warp brings tiles into shared memory, one or two warpgroups of 64 query rows
// compute on them. Split kinds: one warpgroup, the plan's split items; wide kinds: two, its wide items. Both run the
// same arithmetic on the same fragments.
#pragma once

#include "kernels/cuda/attention_consumer.cuh"
#include "kernels/cuda/attention_producer.cuh"

namespace quartz::kernels::cuda::attention_kernels {

template <class T, int D, int KIND>
__global__ void __launch_bounds__((Layout<D, KIND <= kSplitFull>::kThreads), 1)
    attention_kernel(const __grid_constant__ CUtensorMap query_map, const __grid_constant__ CUtensorMap key_map,
                     const __grid_constant__ CUtensorMap value_map, const __grid_constant__ Params p) {
  constexpr bool kSplits = KIND <= kSplitFull, kIsFull = KIND == kSplitFull || KIND == kWideFull;
  constexpr bool kTight = D == 256 || kIsFull;  // the consumers need more, and the producer spills a little
  using L = Layout<D, kSplits>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = shared_address(shared_memory);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t keys = shared + L::kBarriers, values = keys + 16 * L::kStages, queries = values + 16 * L::kStages;
  auto* items = reinterpret_cast<AttentionItem*>(shared_memory + L::kItems);
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(keys + 8 * i, 1);
      barrier_init(keys + 8 * (L::kStages + i), L::kGroups * 4);
      barrier_init(values + 8 * i, 1);
      barrier_init(values + 8 * (L::kStages + i), L::kGroups * 4);
    }
    for (int i = 0; i < L::kQueryBuffers; ++i) {
      barrier_init(queries + 8 * i, 1);
      barrier_init(queries + 8 * (L::kQueryBuffers + i), L::kGroups * 4);
    }
    barrier_init_done();
  }
  if (threadIdx.x == 32) {
    prefetch_map(key_map);
    prefetch_map(value_map);
    prefetch_map(query_map);
  }
  let_next_kernel_start();
  __syncthreads();
  if (warp >= L::kGroups * 4) {
    if constexpr (!kSplits) give_registers<kTight ? 40 : 56>();
    if (warp == L::kGroups * 4) {
      Producer<D, kSplits, kIsFull> producer{
          p, query_map, key_map, value_map, shared, items, lane, kSplits ? evict_first_policy() : 0, 64 / p.group};
      producer.run(keys, values, queries);
    }
  } else {
    if constexpr (!kSplits) take_registers<kTight ? 232 : 224>();
    Consumer<T, D, KIND> consumer{
        p, shared_memory, shared, kSplits ? 0 : warp / 4, warp % 4, lane, static_cast<int>(threadIdx.x % 128)};
    consumer.run(keys, values, queries, items);
  }
}

// ---------------------------------------------------------------- host

template <class T, int D, int KIND>
void launch_kind(const Maps& maps, const Params& p, int blocks, bool overlap, cudaStream_t stream) {
  using L = Layout<D, KIND <= kSplitFull>;
  const auto kernel = attention_kernel<T, D, KIND>;
  static std::atomic<uint64_t> prepared{0};  // a bit a device
  allow_shared_bytes(kernel, L::kSize, prepared);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(L::kThreads);
  config.dynamicSmemBytes = L::kSize;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, maps.query, maps.key, maps.value, p), "attention");
}

template <class T, int D>
void launch(Kind kind, const Maps& maps, const Params& p, int blocks, bool overlap, cudaStream_t stream) {
  switch (kind) {
    case kOneRow:
      return launch_kind<T, D, kOneRow>(maps, p, blocks, overlap, stream);
    case kSplit:
      return launch_kind<T, D, kSplit>(maps, p, blocks, overlap, stream);
    case kSplitFull:
      return launch_kind<T, D, kSplitFull>(maps, p, blocks, overlap, stream);
    case kWide:
      return launch_kind<T, D, kWide>(maps, p, blocks, overlap, stream);
    case kWideFull:
      return launch_kind<T, D, kWideFull>(maps, p, blocks, overlap, stream);
  }
}

}  // namespace quartz::kernels::cuda::attention_kernels
