// Rows that keep few tokens (top-k of at most 256, or the largest alone) in two steps: one streaming pass writes the
// largest value of every 256 tokens; the k-th largest of those bounds the k-th largest token from below, so only the
// few chunks that reach the bound are read again, by one block a row.
#pragma once

#include <cuda_runtime.h>

#include "kernels/sample.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kChunk = 256, kMaxChunks = 4096, kShortK = 256, kShortlist = 2048;
constexpr int kPerLane = kChunk / 32, kVector = 4;

template <class T>
struct alignas(kVector * sizeof(T)) Four {
  T value[kVector];
};

// Memory of one call, given by the caller.
struct Workspace {
  uint64_t* raw_mass;          // of the row at temperature 1
  float *maxima, *raw_maxima;  // (rows, chunks), after step 4 and after step 1
  int chunks;

  __host__ __device__ static int64_t bytes(int64_t rows, int64_t vocabulary) {
    return rows * 8 + 2 * rows * chunks_of(vocabulary) * 4;
  }
  __host__ __device__ static int64_t chunks_of(int64_t vocabulary) { return (vocabulary + kChunk - 1) / kChunk; }
  __host__ __device__ explicit Workspace(const Sample& a)
      : raw_mass(static_cast<uint64_t*>(a.workspace)), chunks(static_cast<int>(chunks_of(a.vocabulary))) {
    maxima = reinterpret_cast<float*>(raw_mass + a.rows);
    raw_maxima = has_dense(a) ? maxima + a.rows * chunks : maxima;
  }
};

enum class Way { kShort, kOpen, kWhole };

__device__ __forceinline__ Way way_of(const Sample& a, const RowRules& rules) {
  const int64_t chunks = Workspace::chunks_of(a.vocabulary);
  const int64_t most = chunks < kShortK ? chunks : kShortK;
  if (a.workspace == nullptr || has_sparse(a) || chunks > kMaxChunks || a.top_n > most) return Way::kWhole;
  if (rules.greedy) {
    // The logprob of the largest needs the mass of all tokens, and only that of the raw logits is at hand.
    return a.logprobs == nullptr || !has_dense(a) ? Way::kShort : Way::kWhole;
  }
  if (rules.top_k > 0) return rules.top_k <= most ? Way::kShort : Way::kWhole;
  return rules.top_p < 1.0f ? Way::kWhole : Way::kOpen;
}
__host__ __device__ __forceinline__ bool wants_raw(const Sample& a) { return a.raw_logprobs != nullptr || a.top_n > 0; }

// The id of element j of a lane in a chunk: two groups of 128 neighbours.
__device__ __forceinline__ int64_t id_in_chunk(int64_t chunk, int lane, int j) {
  return chunk * kChunk + j / kVector * 32 * kVector + lane * kVector + j % kVector;
}

template <class T>
__device__ __forceinline__ void load_chunk(const T* logits, int64_t vocabulary, bool aligned, int64_t chunk, int lane,
                                           Four<T> (&loaded)[kPerLane / kVector]) {
#pragma unroll
  for (int group = 0; group < kPerLane / kVector; ++group) {
    const int64_t id = id_in_chunk(chunk, lane, group * kVector);
    if (aligned && id + kVector <= vocabulary) {
      loaded[group] = *reinterpret_cast<const Four<T>*>(logits + id);
    } else {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        loaded[group].value[j] = id + j < vocabulary ? logits[id + j] : from_float<T>(kMinusInfinity);
      }
    }
  }
}
template <class T>
__device__ __forceinline__ bool is_aligned(const T* logits) {
  return reinterpret_cast<uintptr_t>(logits) % (kVector * sizeof(T)) == 0;
}

constexpr int kStreamThreads = 256, kStreamWarps = kStreamThreads / 32;

// A warp reads kChunks chunks at once.
template <class T, int kChunks>
__global__ void __launch_bounds__(kStreamThreads) maxima_kernel(const __grid_constant__ Sample a, int blocks) {
  const int64_t row = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Workspace space(a);
  if (way_of(a, RowRules(a, row)) == Way::kWhole) return;
  if (block == 0 && threadIdx.x == 0) space.raw_mass[row] = 0;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  const bool aligned = is_aligned(logits);
  const int64_t first = (int64_t{block} * kStreamWarps + warp) * kChunks;
  Four<T> loaded[kChunks][kPerLane / kVector];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) load_chunk(logits, a.vocabulary, aligned, first + c, lane, loaded[c]);
  const bool dense = has_dense(a);
  RowInputs inputs;
  if (dense) inputs = RowInputs(a, row);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c >= space.chunks) break;
    float raw = kMinusInfinity, largest = kMinusInfinity;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) raw = fmaxf(raw, sanitized(to_float(loaded[c][j / kVector].value[j % kVector])));
    if (dense) {
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int64_t id = id_in_chunk(first + c, lane, j);
        if (id >= a.vocabulary) continue;
        largest = fmaxf(largest, inputs.dense_value(to_float(loaded[c][j / kVector].value[j % kVector]), id));
      }
      largest = float_of_order(__reduce_max_sync(~0u, order_of(largest)));
    }
    raw = float_of_order(__reduce_max_sync(~0u, order_of(raw)));
    if (lane == 0) {
      space.raw_maxima[row * space.chunks + first + c] = raw;
      if (dense) space.maxima[row * space.chunks + first + c] = largest;
    }
  }
}

// The largest of a row's maxima, for every thread of a block.
__device__ __forceinline__ float largest_of(const float* maxima, int chunks) {
  __shared__ uint32_t tops[kStreamWarps];
  uint32_t top = 0;
  for (int c = threadIdx.x; c < chunks; c += kStreamThreads) top = max(top, order_of(maxima[c]));
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  for (int w = 0; w < kStreamWarps; ++w) top = max(top, tops[w]);
  return float_of_order(top);
}

// Adds the sums of a block's threads to a number in global memory.
__device__ __forceinline__ void add_of_block(uint64_t sum, uint64_t* result) {
  __shared__ unsigned long long total;
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) atomicAdd(&total, static_cast<unsigned long long>(sum));
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned long long*>(result), total);
}

// The mass of rows at temperature 1; integers, so the order of the atomic sums is irrelevant.
template <class T, int kChunks>
__global__ void __launch_bounds__(kStreamThreads) raw_mass_kernel(const __grid_constant__ Sample a, int blocks) {
  const int64_t row = blockIdx.x / blocks;
  const int block = blockIdx.x % blocks, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Workspace space(a);
  if (way_of(a, RowRules(a, row)) == Way::kWhole) return;
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  const bool aligned = is_aligned(logits);
  const int64_t first = (int64_t{block} * kStreamWarps + warp) * kChunks;
  Four<T> loaded[kChunks][kPerLane / kVector];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) load_chunk(logits, a.vocabulary, aligned, first + c, lane, loaded[c]);
  const float largest = largest_of(space.raw_maxima + row * space.chunks, space.chunks);
  if (largest == kMinusInfinity) return;
  uint64_t sum = 0;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c >= space.chunks) break;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float z = sanitized(to_float(loaded[c][j / kVector].value[j % kVector])) - largest;
      if (z >= kMasslessBelow) sum += mass_of(z);
    }
  }
  add_of_block(sum, space.raw_mass + row);
}

// The first tokens of a row in their order, found by one block.
template <int kThreads>
class Shortlist {
 public:
  struct Memory {
    uint64_t keys[kShortlist];
    float maxima[kMaxChunks];
  };

  __device__ Shortlist(const Sample& a, int64_t row, Memory& memory, uint32_t& count, uint64_t* partial)
      : a_(a), row_(row), memory_(memory), count_(count), partial_(partial) {}

  // Sorts the keys of the first `k` tokens, and perhaps more, to the front; false if there are too many candidates.
  __device__ bool find(bool raw, int k) {
    const Workspace space(a_);
    const float* maxima = (raw ? space.raw_maxima : space.maxima) + row_ * space.chunks;
    uint32_t top = 0;
    for (int c = threadIdx.x; c < space.chunks; c += kThreads) {
      memory_.maxima[c] = maxima[c];
      top = max(top, order_of(maxima[c]));
    }
    if (threadIdx.x == 0) count_ = 0;
    top = static_cast<uint32_t>(block_max(top));
    // The largest bound that k of the maxima reach, by bisection.
    uint32_t low = order_of(kMinusInfinity), high = top;
    while (low < high) {
      const uint32_t middle = high - (high - low) / 2;
      int reached = 0;
      for (int c = threadIdx.x; c - static_cast<int>(threadIdx.x) < space.chunks; c += kThreads) {
        reached += __syncthreads_count(c < space.chunks && order_of(memory_.maxima[c]) >= middle);
      }
      if (reached >= k) {
        low = middle;
        if (reached == k) break;
      } else {
        high = middle - 1;
      }
    }
    const float bound = fmaxf(float_of_order(low), -kLargest);
    switch (a_.dtype) {
      case DType::kFloat32:
        gather<float>(raw, bound, space.chunks);
        break;
      case DType::kFloat16:
        gather<Float16>(raw, bound, space.chunks);
        break;
      default:
        gather<BFloat16>(raw, bound, space.chunks);
    }
    __syncthreads();
    found_ = static_cast<int>(count_);
    if (found_ > kShortlist) return false;
    int padded = 2;
    while (padded < found_) padded *= 2;
    for (int i = found_ + threadIdx.x; i < padded; i += kThreads) memory_.keys[i] = 0;
    __syncthreads();
    sort(padded);
    found_ = min(found_, k);
    return true;
  }

  __device__ int found() const { return found_; }
  __device__ float value(int i) const { return float_of_order(static_cast<uint32_t>(memory_.keys[i] >> 32)); }
  __device__ uint32_t id(int i) const { return ~static_cast<uint32_t>(memory_.keys[i]); }

  __device__ uint64_t block_max(uint64_t v) {
    return block_reduce(v, [](uint64_t a, uint64_t b) { return max(a, b); });
  }
  __device__ uint64_t block_sum(uint64_t v) {
    return block_reduce(v, [](uint64_t a, uint64_t b) { return a + b; });
  }

  // Steps 6 to 9 and the logprob of the token, for a row with something left.
  __device__ int64_t draw(const RowRules& rules, const TokenNoise& noise, float* logprob) {
    const int i = threadIdx.x;
    const bool listed = i < found_ && i < rules.top_k;
    const float largest = value(0), inverse = rules.inverse_temperature;
    const float x = listed ? value(i) : kMinusInfinity, z = scaled(x, largest, inverse);
    bool kept = listed && z >= rules.lowest_z;
    const uint64_t mass = kept ? mass_of(z) : 0;
    if (rules.top_p < 1.0f) {
      uint64_t sum = mass;  // up to and with this token
      const int lane = i % 32, warp = i / 32;
      for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t left = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += left;
      }
      if (lane == 31) partial_[warp] = sum;
      __syncthreads();
      uint64_t total = 0;
      for (int w = 0; w < kThreads / 32; ++w) {
        total += partial_[w];
        if (w < warp) sum += partial_[w];
      }
      __syncthreads();
      kept = kept && sum - mass < mass_limit(rules.top_p, total);
    }
    uint64_t best = 0;
    if (kept) {
      const float score = z + noise.gumbel(id(i));
      best = uint64_t{order_of(score)} << 32 | (~id(i) & 0xffffffffu);
    }
    const int64_t token = ~static_cast<uint32_t>(block_max(best));
    if (logprob != nullptr) {
      const uint64_t sum = block_sum(kept ? mass : 0);
      if (listed && id(i) == token) *logprob = z - log_of_mass(sum);
    }
    return token;
  }

 private:
  template <class Combine>
  __device__ uint64_t block_reduce(uint64_t v, const Combine& combine) {
    for (int offset = 16; offset > 0; offset /= 2) v = combine(v, __shfl_xor_sync(~0u, v, offset));
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial_[threadIdx.x / 32] = v;
    __syncthreads();
    v = partial_[0];
    for (int w = 1; w < kThreads / 32; ++w) v = combine(v, partial_[w]);
    return v;
  }

  // The tokens of chunks that reach the bound and reach it themselves.
  template <class T>
  __device__ void gather(bool raw, float bound, int chunks) {
    const T* logits = static_cast<const T*>(a_.logits) + row_ * a_.stride;
    const bool aligned = is_aligned(logits), dense = !raw && has_dense(a_);
    RowInputs inputs;
    if (dense) inputs = RowInputs(a_, row_);
    const int lane = threadIdx.x % 32;
    for (int chunk = threadIdx.x / 32; chunk < chunks; chunk += kThreads / 32) {
      if (memory_.maxima[chunk] < bound) continue;
      Four<T> loaded[kPerLane / kVector];
      load_chunk(logits, a_.vocabulary, aligned, chunk, lane, loaded);
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int64_t id = id_in_chunk(chunk, lane, j);
        float x = sanitized(to_float(loaded[j / kVector].value[j % kVector]));
        if (dense && id < a_.vocabulary) x = inputs.dense_value(x, id);
        if (!(x >= bound)) continue;
        const uint32_t place = atomicAdd(&count_, 1u);
        if (place < kShortlist) memory_.keys[place] = uint64_t{order_of(x)} << 32 | (~static_cast<uint32_t>(id));
      }
    }
  }

  __device__ void sort(int padded) {  // bitonic, descending
    for (int size = 2; size <= padded; size *= 2) {
      for (int step = size / 2; step > 0; step /= 2) {
        for (int i = threadIdx.x; i < padded / 2; i += kThreads) {
          const int low = 2 * i - (i & (step - 1)), high = low + step;
          const uint64_t first = memory_.keys[low], second = memory_.keys[high];
          if ((first < second) == ((low & size) == 0)) {
            memory_.keys[low] = second;
            memory_.keys[high] = first;
          }
        }
        __syncthreads();
      }
    }
  }

  const Sample& a_;
  const int64_t row_;
  Memory& memory_;
  uint32_t& count_;
  uint64_t* partial_;
  int found_ = 0;
};

}  // namespace
}  // namespace quartz::kernels::cuda
