// A block a row: one pass for the largest probability and the errors, one for the scores or the masses. With
// replacement the prefix sums go to the workspace, where a thread a draw looks its category up.
#include "kernels/multinomial.h"

#include <cuda_runtime.h>

#include <algorithm>

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr unsigned kAll = 0xffffffffu;

// combine() over the block; every thread gets the result.
template <class V, class Combine>
__device__ __forceinline__ V over_block(V value, const Combine& combine) {
  __shared__ V of_warp[kWarps];
  for (int distance = 16; distance > 0; distance /= 2) value = combine(value, __shfl_xor_sync(kAll, value, distance));
  __syncthreads();  // the values of the call before have been read
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp[0];
  for (int w = 1; w < kWarps; ++w) value = combine(value, of_warp[w]);
  return value;
}

// The largest probability of the row, 1 where there is none; raises the flags.
template <class T>
__device__ __forceinline__ double look_at(const Multinomial& a, const T* p) {
  double largest = 0.0;
  int candidates = 0, bad = 0;
  for (int64_t j = threadIdx.x; j < a.categories; j += kThreads) {
    const double value = probability_of(p[j]);
    const bool valid = is_probability(value);
    bad |= !valid;
    largest = valid && value > largest ? value : largest;
    candidates += valid && value > 0.0;
  }
  largest = over_block(largest, [](double x, double y) { return x > y ? x : y; });
  candidates = over_block(candidates, [](int x, int y) { return x + y; });
  bad = over_block(bad, [](int x, int y) { return x | y; });
  if (threadIdx.x == 0) {
    int flags = bad != 0 ? kBadProbability : 0;
    if (candidates == 0) flags |= kNoProbability;
    if (!a.replacement && candidates > 0 && candidates < a.samples) flags |= kTooFewCategories;
    if (flags != 0) atomicOr(a.flags, flags);
  }
  return candidates > 0 ? largest : 1.0;
}

// One draw: the index. Several: the scores of all categories.
template <class T>
__global__ void __launch_bounds__(kThreads) race_kernel(const Multinomial a) {
  const int64_t row = blockIdx.x, blocks = (a.categories + 3) / 4;
  const T* p = static_cast<const T*>(a.probabilities) + row * a.categories;
  float* scores = a.samples > 1 ? static_cast<float*>(a.workspace) + row * a.categories : nullptr;
  const WeightScale scale(look_at(a, p));
  const RandomSource source = a.source.resolved();
  unsigned long long best = ~0ull;
  for (int64_t block = threadIdx.x; block < blocks; block += kThreads) {
    const PhiloxWords words = source.block(row * blocks + block);
    for (int i = 0; i < 4 && 4 * block + i < a.categories; ++i) {
      const int64_t j = 4 * block + i;
      const double value = probability_of(p[j]);
      float score = kNoScore;
      if (is_probability(value) && value > 0.0) {
        const uint32_t word = words.word[i];
        const float exponential =
            needs_tail(word) ? race_exponential(word, source.block(row * blocks + block, NoiseStream::kRaces).word[i])
                             : race_exponential(word);
        score = race_score(scale.weight(value), exponential);
      }
      if (scores != nullptr) {
        scores[j] = score;
      } else {
        const unsigned long long key = race_key(score, j);
        best = key < best ? key : best;
      }
    }
  }
  if (scores != nullptr) return;
  best = over_block(best, [](unsigned long long x, unsigned long long y) { return x < y ? x : y; });
  if (threadIdx.x == 0) a.result[row] = static_cast<int64_t>(best & 0xffffffffu);
}

// Inclusive prefix sums of the masses, by tiles of one mass a thread.
template <class T>
__global__ void __launch_bounds__(kThreads) prefix_kernel(const Multinomial a) {
  __shared__ uint64_t of_warp[kWarps];
  const int64_t row = blockIdx.x;
  const T* p = static_cast<const T*>(a.probabilities) + row * a.categories;
  uint64_t* prefix = static_cast<uint64_t*>(a.workspace) + row * a.categories;
  const WeightScale scale(look_at(a, p));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t before = 0;
  for (int64_t tile = 0; tile < a.categories; tile += kThreads) {
    const int64_t j = tile + threadIdx.x;
    uint64_t sum = j < a.categories ? multinomial_mass(scale.weight(probability_of(p[j]))) : 0;
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint64_t other = __shfl_up_sync(kAll, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) of_warp[warp] = sum;
    __syncthreads();
    uint64_t whole = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) sum += of_warp[w];
      whole += of_warp[w];
    }
    if (j < a.categories) prefix[j] = before + sum;
    before += whole;
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kThreads) draw_kernel(const Multinomial a) {
  const RandomSource source = a.source.resolved();
  const int64_t blocks = (a.samples + 1) / 2, step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < a.rows * a.samples; i += step) {
    const int64_t row = i / a.samples, k = i % a.samples;
    const uint64_t* prefix = static_cast<const uint64_t*>(a.workspace) + row * a.categories;
    const uint64_t sum = prefix[a.categories - 1];
    const PhiloxWords words = source.block(row * blocks + k / 2);
    a.result[i] = sum == 0 ? 0 : multinomial_find(prefix, a.categories, multinomial_target(words, k, sum));
  }
}

template <class T>
void launch(const Multinomial& a, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(a.rows);
  if (!a.replacement) {
    race_kernel<T><<<rows, kThreads, 0, stream>>>(a);
    return;
  }
  prefix_kernel<T><<<rows, kThreads, 0, stream>>>(a);
  const int64_t grid = (a.rows * a.samples + kThreads - 1) / kThreads;
  draw_kernel<<<static_cast<unsigned>(std::min<int64_t>(grid, int64_t{1} << 16)), kThreads, 0, stream>>>(a);
}

}  // namespace

int64_t multinomial_workspace(const Multinomial& a) {
  if (a.replacement) return a.rows * a.categories * static_cast<int64_t>(sizeof(uint64_t));
  return a.samples > 1 ? a.rows * a.categories * static_cast<int64_t>(sizeof(float)) : 0;
}

void multinomial(const Multinomial& a, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  with_random_type(a.type, [&](auto element) {
    if constexpr (sizeof(element) > 1) launch<decltype(element)>(a, cuda_stream);
  });
}

}  // namespace quartz::kernels::cuda
