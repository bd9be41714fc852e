// The general kernel: a block of 128 threads for one query of one head, a thread a key for the scores and a thread a
// column for the values. For what the tile kernels do not take: float32, large heads, any strides, other GPUs.
#include <cuda_runtime.h>

#include "kernels/attention_cuda.h"
#include "kernels/cuda/launch.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // keys of a tile

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

template <class T>
__device__ __forceinline__ float mask_value(const Attention& a, int64_t at, bool& hidden) {
  switch (a.mask_kind) {
    case MaskKind::kVisible:
      hidden = static_cast<const uint8_t*>(a.mask)[at] == 0;
      return 0.0f;
    case MaskKind::kFloat32:
      return static_cast<const float*>(a.mask)[at];
    case MaskKind::kFloat16:
      return to_float(static_cast<const Float16*>(a.mask)[at]);
    default:
      return to_float(static_cast<const BFloat16*>(a.mask)[at]);
  }
}

// Over the block: the maximum (exact), or the sum by the tree of lanes 16, 8, 4, 2, 1 and then the warps in order.
template <bool SUM>
__device__ float over_block(float x, float* shared) {
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(~0u, x, step);
    x = SUM ? x + other : fmaxf(x, other);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared[0];
  for (int w = 1; w < kThreads / 32; ++w) x = SUM ? x + shared[w] : fmaxf(x, shared[w]);
  return x;
}

template <class T>
__global__ void __launch_bounds__(kThreads) general_kernel(const Attention a, int64_t blocks) {
  extern __shared__ float shared[];  // the query, then the sums of values
  __shared__ float probability[kThreads], reduced[kThreads / 32];
  __shared__ int64_t key_rows[kThreads];
  float *query = shared, *sums = shared + a.head_size;
  const bool ragged = a.query_starts.data != nullptr;
  const int head = blockIdx.y, thread = threadIdx.x;
  int64_t row = blockIdx.x, sequence = blockIdx.z, keys = a.keys, position;
  int64_t first_row = 0;  // of the keys: the one that holds key 0 of the sequence
  if (ragged) {
    position = 0;
    if (row < a.query_starts[0] || row >= a.query_starts[a.batch]) {
      sequence = keys = 0;  // a row of no sequence
    } else {
      int64_t low = 0, high = a.batch;
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (a.query_starts[middle] <= row ? low : high) = middle;
      }
      sequence = low;
      keys = min(max(a.key_counts[sequence], int64_t{0}), a.keys);
      position = keys - (a.query_starts[sequence + 1] - row);
    }
  } else {
    if (a.key_begin.data != nullptr) first_row = a.key_begin[sequence];
    if (a.key_end.data != nullptr) keys = min(keys, a.key_end[sequence]);
    keys -= first_row;
    position = a.query_offset - first_row + row;
  }
  const int64_t batch = ragged ? 0 : sequence;
  const int64_t end = a.causal ? min(keys, position + 1) : keys;
  const int64_t stored = max(int64_t{0}, -first_row);
  const int64_t begin = a.window > 0 ? max(stored, position + 1 - a.window) : stored;
  const int64_t kv_head = head / (a.heads / a.kv_heads);
  const T* q = static_cast<const T*>(a.q) + batch * a.q_strides.batch + head * a.q_strides.head + row * a.q_strides.row;
  for (int64_t d = thread; d < a.head_size; d += kThreads) query[d] = to_float(q[d]) * a.scale;
  for (int64_t d = thread; d < a.value_size; d += kThreads) sums[d] = 0.0f;
  __syncthreads();

  float m = minus_infinity(), l = 0.0f;
  for (int64_t tile = begin / kThreads * kThreads; tile < end; tile += kThreads) {
    const int64_t key = tile + thread;
    bool hidden = key < begin || key >= end;
    float score = minus_infinity();
    if (!hidden) {
      int64_t block = sequence, slot = key + first_row;
      if (a.block_table.data != nullptr) {
        block = a.block_table[sequence * a.block_table_stride + key / a.block_size];
        if (blocks > 0) block = min(max(block, int64_t{0}), blocks - 1);  // nobody could report it
        slot = key % a.block_size;
      }
      const T* k =
          static_cast<const T*>(a.k) + block * a.k_strides.batch + kv_head * a.k_strides.head + slot * a.k_strides.row;
      key_rows[thread] = block * a.v_strides.batch + slot * a.v_strides.row;
      float sum = 0.0f;
      for (int64_t d = 0; d < a.head_size; ++d) sum = fmaf(query[d], to_float(k[d]), sum);
      if (a.soft_cap > 0.0f) sum = a.soft_cap * tanhf(sum / a.soft_cap);
      if (a.mask_kind != MaskKind::kNone) {
        sum += mask_value<T>(a,
                             sequence * a.mask_strides[0] + head * a.mask_strides[1] + row * a.mask_strides[2] +
                                 slot * a.mask_strides[3],
                             hidden);
      }
      if (!hidden) score = sum;
    }
    const float n = fmaxf(m, over_block<false>(score, reduced)), finite = n == minus_infinity() ? 0.0f : n;
    const float factor = expf(m - finite), p = expf(score - finite);
    m = n;
    l = fmaf(l, factor, over_block<true>(p, reduced));
    probability[thread] = p;
    __syncthreads();
    const int count = static_cast<int>(min(int64_t{kThreads}, end - tile));
    for (int64_t d = thread; d < a.value_size; d += kThreads) {
      float sum = sums[d] * factor;
      const T* v = static_cast<const T*>(a.v) + kv_head * a.v_strides.head + d;
      for (int j = 0; j < count; ++j) {
        const float weight = probability[j];
        if (weight != 0.0f) sum = fmaf(weight, to_float(v[key_rows[j]]), sum);
      }
      sums[d] = sum;
    }
    __syncthreads();
  }
  float scale = 1.0f;
  if (a.sinks != nullptr) {
    const float sink = a.sinks[head], n = fmaxf(m, sink), finite = n == minus_infinity() ? 0.0f : n;
    scale = expf(m - finite);
    l = fmaf(l, scale, expf(sink - finite));
    m = n;
  }
  const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
  T* out = static_cast<T*>(a.out) + batch * a.out_strides.batch + head * a.out_strides.head + row * a.out_strides.row;
  for (int64_t d = thread; d < a.value_size; d += kThreads) {
    out[d] = from_float<T>(fmaf(sums[d] * scale, inverse, 0.0f));
  }
  if (thread == 0 && a.logsumexp != nullptr) {
    a.logsumexp[batch * a.logsumexp_strides.batch + head * a.logsumexp_strides.head + row * a.logsumexp_strides.row] =
        l == 0.0f ? minus_infinity() : m + logf(l);
  }
}

template <class T>
void launch(const Attention& a, int64_t blocks, cudaStream_t stream) {
  const bool ragged = a.query_starts.data != nullptr;
  const dim3 grid(static_cast<unsigned>(a.queries), static_cast<unsigned>(a.heads),
                  static_cast<unsigned>(ragged ? 1 : a.batch));
  const auto bytes = static_cast<size_t>(a.head_size + a.value_size) * sizeof(float);
  general_kernel<T><<<grid, kThreads, bytes, stream>>>(a, blocks);
  check(cudaGetLastError(), "attention");
}

}  // namespace

void general_attention(const Attention& a, int64_t blocks, void* stream) {
  if (a.queries == 0 || a.heads == 0 || a.batch == 0) return;
  const auto on = static_cast<cudaStream_t>(stream);
  switch (a.dtype) {
    case DType::kFloat32:
      return launch<float>(a, blocks, on);
    case DType::kFloat16:
      return launch<Float16>(a, blocks, on);
    case DType::kBFloat16:
      return launch<BFloat16>(a, blocks, on);
  }
}

}  // namespace quartz::kernels::cuda
