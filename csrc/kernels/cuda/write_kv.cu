// Copies rows of keys and values into a cache: a few lanes for each row and head, 16 bytes a lane where all is aligned.
#include <cuda_runtime.h>

#include <algorithm>

#include "kernels/attention_cuda.h"
#include "kernels/cuda/launch.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct Both {
  WriteKv part[2];  // keys, values
  int parts;
  int64_t slots;  // of the cache
};

// Unit: what a lane moves at a time.
template <class Unit>
__global__ void __launch_bounds__(kThreads) write_rows(const Both both, int lanes) {
  const WriteKv& a = both.part[blockIdx.y];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  if (row >= a.tokens * a.heads) return;
  const int64_t token = row / a.heads, head = row % a.heads, slot = a.slots[token];
  if (slot < 0 || slot >= both.slots) return;
  const int64_t bytes = a.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t to =
      slot / a.block_size * a.block_stride + slot % a.block_size * a.slot_stride + head * a.cache_head_stride;
  const auto* source = reinterpret_cast<const Unit*>(static_cast<const char*>(a.rows) +
                                                     (token * a.row_stride + head * a.row_head_stride) * bytes);
  auto* target = reinterpret_cast<Unit*>(static_cast<char*>(a.cache) + to * bytes);
  const int units = static_cast<int>(a.size * bytes / static_cast<int64_t>(sizeof(Unit)));
  for (int i = threadIdx.x % lanes; i < units; i += lanes) target[i] = source[i];
}

bool in_sixteens(const WriteKv& a) {
  const int64_t bytes = size_of(a.dtype);
  const auto fine = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  bool all = fine(a.rows) && fine(a.cache);
  for (const int64_t n :
       {a.size, a.row_stride, a.row_head_stride, a.block_stride, a.slot_stride, a.cache_head_stride}) {
    all = all && n * bytes % 16 == 0;
  }
  return all;
}

}  // namespace

void write_kv(const WriteKv& key, const WriteKv* value, int64_t blocks, void* stream) {
  Both both{};
  both.parts = value != nullptr ? 2 : 1;
  both.part[0] = key;
  if (value != nullptr) both.part[1] = *value;
  both.slots = blocks * key.block_size;
  int64_t rows = key.tokens * key.heads, size = key.size;
  bool wide = in_sixteens(key);
  if (value != nullptr) {
    rows = std::max(rows, value->tokens * value->heads);
    size = std::max(size, value->size);
    wide = wide && in_sixteens(*value);
  }
  if (rows == 0) return;
  const int64_t bytes = size_of(key.dtype), units = size * bytes / (wide ? 16 : bytes);
  int lanes = 1;
  while (lanes < units && lanes < 32) lanes *= 2;
  const int64_t per_block = kThreads / lanes;
  const dim3 grid(static_cast<unsigned>((rows + per_block - 1) / per_block), both.parts);
  const auto on = static_cast<cudaStream_t>(stream);
  if (wide) {
    write_rows<uint4><<<grid, kThreads, 0, on>>>(both, lanes);
  } else if (bytes == 2) {
    write_rows<uint16_t><<<grid, kThreads, 0, on>>>(both, lanes);
  } else {
    write_rows<uint32_t><<<grid, kThreads, 0, on>>>(both, lanes);
  }
  check(cudaGetLastError(), "write_kv");
}

}  // namespace quartz::kernels::cuda
