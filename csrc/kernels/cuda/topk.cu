// One block a row: the k-th key by four passes over digits of 8 bits, then everything below it and, of its equals, the
// lowest indices, then a sort of the k in shared memory.
#include "kernels/topk.h"

#include "kernels/cuda/rows.cuh"

namespace quartz::kernels::cuda {
namespace {

constexpr int kDigits = 256;

template <class T, int THREADS>
__global__ void __launch_bounds__(THREADS) topk_rows(TopK a, int padded) {
  extern __shared__ unsigned long long chosen[];  // `padded` keys: a power of two, at least k
  __shared__ unsigned histogram[kDigits];
  __shared__ unsigned digit_found, wanted, count, of_warp[THREADS / 32];
  const T* x = static_cast<const T*>(a.x) + static_cast<int64_t>(blockIdx.x) * a.x_stride;
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
  T* values = static_cast<T*>(a.values) + static_cast<int64_t>(blockIdx.x) * a.k;
  int64_t* indices = a.indices + static_cast<int64_t>(blockIdx.x) * a.k;
  for (int64_t i = threadIdx.x; i < a.k; i += THREADS) {
    const auto index = static_cast<int64_t>(chosen[i] & 0xffffffffull);
    values[i] = x[index];
    indices[i] = index;
  }
}

}  // namespace

void topk(const TopK& a, void* on) {
  if (a.rows == 0 || a.k == 0) return;
  int padded = 1;
  while (padded < a.k) padded *= 2;
  const auto stream = static_cast<cudaStream_t>(on);
  const auto rows = static_cast<unsigned>(a.rows);
  with_dtype(a.dtype, [&]<class T>() {
    if (a.width <= 4096) {
      topk_rows<T, 128><<<rows, 128, padded * 8, stream>>>(a, padded);
    } else {
      topk_rows<T, 1024><<<rows, 1024, padded * 8, stream>>>(a, padded);
    }
  });
}

}  // namespace quartz::kernels::cuda
