// One block a row. Few of many elements: each thread finds its best; the k-th of these bounds the result, so the
// elements within the bound, not many more than k as a rule, are counted against each other. Else, and where they are
// too many: the k-th key by four passes over digits of 8 bits, then everything below it and, of its equals, the lowest
// indices, then a sort of the k in shared memory.
#include "kernels/topk.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kDigits = 256;
constexpr int kCandidates = 256;  // more are left to the other way

template <class T>
__device__ __forceinline__ void put(const TopK& a, const T* x, int64_t rank, unsigned long long key) {
  const auto index = static_cast<int64_t>(key & 0xffffffffull);
  static_cast<T*>(a.values)[static_cast<int64_t>(blockIdx.x) * a.k + rank] = x[index];
  a.indices[static_cast<int64_t>(blockIdx.x) * a.k + rank] = index;
}

// False, with nothing written, if this way does not serve the row. `candidates` is for kCandidates keys.
template <class T, int THREADS>
__device__ bool few_of_many(const TopK& a, const T* x, bool aligned, unsigned long long* candidates) {
  constexpr int V = kVector<T>, kSlots = THREADS < 256 ? THREADS : 256, kOfSlot = THREADS / kSlots;
  constexpr unsigned long long kNothing = ~0ull;
  __shared__ unsigned long long best_of[kSlots], bound;
  __shared__ unsigned found;
  const int64_t vectors = (a.width + V - 1) / V;
  if (a.k > kSlots || vectors < a.k * kOfSlot) return false;
  // Calls body(key) for the thread's elements.
  const auto each = [&](const auto& body) {
#pragma unroll 2
    for (int64_t v = threadIdx.x; v < vectors; v += THREADS) {
      float values[V];
      widen(load_pack<T>(x, v, a.width, aligned, T{}), values);
#pragma unroll
      for (int i = 0; i < V; ++i) {
        if (v * V + i < a.width) body(topk_key(values[i], v * V + i, a.largest));
      }
    }
  };
  unsigned long long best = kNothing;
  each([&](unsigned long long key) { best = min(best, key); });
#pragma unroll
  for (int distance = 1; distance < kOfSlot; distance *= 2) {
    best = min(best, __shfl_xor_sync(0xffffffffu, best, distance));
  }
  if (threadIdx.x % kOfSlot == 0) best_of[threadIdx.x / kOfSlot] = best;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  if (threadIdx.x < kSlots) {
    const auto mine = best_of[threadIdx.x];
    int rank = 0;
#pragma unroll 8
    for (int slot = 0; slot < kSlots; ++slot) rank += best_of[slot] < mine;
    if (rank == a.k - 1 && mine != kNothing) bound = mine;  // keys differ: it is one thread
  }
  __syncthreads();
  const auto most = bound;
  each([&](unsigned long long key) {
    if (key > most) return;
    const unsigned n = atomicAdd(&found, 1u);
    if (n < kCandidates) candidates[n] = key;
  });
  __syncthreads();
  const unsigned n = found;
  if (n > kCandidates) return false;
  for (unsigned c = threadIdx.x; c < n; c += THREADS) {
    const auto mine = candidates[c];
    int rank = 0;
    for (unsigned other = 0; other < n; ++other) rank += candidates[other] < mine;
    if (rank < a.k) put(a, x, rank, mine);
  }
  return true;
}

template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS) topk_rows(TopK a, int padded, bool aligned) {
  extern __shared__ unsigned long long chosen[];  // kCandidates, or `padded` keys: a power of two, at least k
  __shared__ unsigned histogram[kDigits];
  __shared__ unsigned digit_found, wanted, count, of_warp[THREADS / 32];
  const T* x = static_cast<const T*>(a.x) + static_cast<int64_t>(blockIdx.x) * a.x_stride;
  if (few_of_many<T, THREADS>(a, x, aligned, chosen)) return;
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto key_of = [&](int64_t k) { return static_cast<uint32_t>(topk_key(widen(x[k]), 0, a.largest) >> 32); };

  if (threadIdx.x == 0) wanted = static_cast<unsigned>(a.k);
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += THREADS) histogram[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int64_t k = threadIdx.x; k < a.width; k += THREADS) {
      const uint32_t key = key_of(k);
      if (shift == 24 || (key >> (shift + 8)) == prefix) atomicAdd(&histogram[key >> shift & 255u], 1u);
    }
    __syncthreads();
    if (warp == 0) {  // the digit whose keys hold the wanted-th
      unsigned mine[kDigits / 32], sum = 0;
#pragma unroll
      for (int i = 0; i < kDigits / 32; ++i) sum += mine[i] = histogram[lane * (kDigits / 32) + i];
      unsigned upto = sum;
      for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned other = __shfl_up_sync(0xffffffffu, upto, distance);
        if (lane >= distance) upto += other;
      }
      unsigned before = upto - sum;
      const unsigned rank = wanted;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kDigits / 32; ++i) {
        if (before < rank && rank <= before + mine[i]) {
          digit_found = static_cast<unsigned>(lane * (kDigits / 32) + i);
          wanted = rank - before;
        }
        before += mine[i];
      }
    }
    __syncthreads();
    prefix = prefix << 8 | digit_found;
  }

  // `wanted` of the keys equal to `prefix` belong to the result, those of the lowest indices.
  if (threadIdx.x == 0) count = 0;
  for (int i = threadIdx.x; i < padded; i += THREADS) chosen[i] = ~0ull;
  __syncthreads();
  const unsigned equals = wanted, smaller = static_cast<unsigned>(a.k) - equals;
  unsigned equal_before = 0;
  for (int64_t tile = 0; tile < a.width; tile += THREADS) {
    const int64_t k = tile + threadIdx.x;
    const uint32_t key = k < a.width ? key_of(k) : ~0u;
    const bool is_equal = k < a.width && key == prefix;
    if (k < a.width && key < prefix) {
      chosen[atomicAdd(&count, 1u)] = static_cast<unsigned long long>(key) << 32 | static_cast<uint32_t>(k);
    }
    if (equal_before < equals) {  // the same for all threads
      const unsigned ballot = __ballot_sync(0xffffffffu, is_equal);
      if (lane == 0) of_warp[warp] = __popc(ballot);
      __syncthreads();
      unsigned place = equal_before + __popc(ballot & ((1u << lane) - 1u));
      for (int w = 0; w < THREADS / 32; ++w) {
        if (w < warp) place += of_warp[w];
        equal_before += of_warp[w];
      }
      if (is_equal && place < equals) {
        chosen[smaller + place] = static_cast<unsigned long long>(key) << 32 | static_cast<uint32_t>(k);
      }
      __syncthreads();
    }
  }
  __syncthreads();

  for (int size = 2; size <= padded; size *= 2) {  // bitonic
    for (int distance = size / 2; distance > 0; distance /= 2) {
      for (int i = threadIdx.x; i < padded; i += THREADS) {
        const int other = i ^ distance;
        if (other > i) {
          const auto first = chosen[i], second = chosen[other];
          if ((first > second) == ((i & size) == 0)) {
            chosen[i] = second;
            chosen[other] = first;
          }
        }
      }
      __syncthreads();
    }
  }
  for (int64_t i = threadIdx.x; i < a.k; i += THREADS) put(a, x, i, chosen[i]);
}

}  // namespace

void topk(const TopK& a, void* on) {
  if (a.rows == 0 || a.k == 0) return;
  int padded = 1;
  while (padded < a.k) padded *= 2;
  const auto stream = static_cast<cudaStream_t>(on);
  const auto rows = static_cast<unsigned>(a.rows);
  const int bytes = 8 * (padded > kCandidates ? padded : kCandidates);
  with_dtype(a.dtype, [&]<class T>() {
    const bool aligned = aligned_rows(a.x, a.x_stride, sizeof(T), a.rows);
    if (a.width <= 4096) {
      topk_rows<T, 128><<<rows, 128, bytes, stream>>>(a, padded, aligned);
    } else {
      topk_rows<T, 1024><<<rows, 1024, bytes, stream>>>(a, padded, aligned);
    }
  });
}

}  // namespace quartz::kernels::cuda
