// Folds the chunks of units that were divided among blocks, in order, with the arithmetic of the main kernel. Slot 0 of
// a fold holds its folded prefix, each other slot one chunk.
#include "kernels/cuda/attention_launch.h"
#include "kernels/cuda/attention_numerics.cuh"
#include "kernels/cuda/hopper.cuh"

namespace quartz::kernels::cuda::attention_kernels {
namespace {

template <class T>
struct FoldRow {
  const Params& p;
  const AttentionFold& fold;
  int row;

  QUARTZ_DEVICE int token() const { return fold.token + row / p.group; }
  QUARTZ_DEVICE int head() const { return fold.head * p.group + row % p.group; }
  QUARTZ_DEVICE int64_t batch() const { return p.batched ? fold.sequence : 0; }

  // The sink, then 1 / L; writes the logsumexp if `writer`. Returns the factors of a value.
  QUARTZ_DEVICE float2 finish(RowState& total, bool writer) const {
    float scale = 1.0f;
    if (p.sinks != nullptr) scale = fold_row(total, p.sinks[head()] * p.c_inverse, 1.0f, p.c).before;
    if (writer && p.lse != nullptr) {
      p.lse[batch() * p.lse_batch + token() * p.lse_token + head() * p.lse_head] = natural_logsumexp(total, p.c);
    }
    return make_float2(scale, inverse_sum(total.l));
  }
  QUARTZ_DEVICE T* out() const {
    return static_cast<T*>(p.out) + batch() * p.out_batch + token() * p.out_token + head() * p.out_head;
  }
  QUARTZ_DEVICE uint32_t round(float x, float y, float2 f) const {
    return pack<T>(result(__fmul_rn(x, f.x), f.y), result(__fmul_rn(y, f.x), f.y));
  }
};

// A warp a row: for many rows of few chunks.
template <class T, int D>
__global__ void __launch_bounds__(128) fold_rows(const __grid_constant__ Params p) {
  const int folds = p.plan[kPlanFolds];
  const AttentionFold fold = p.folds[blockIdx.x];
  const int row = blockIdx.y * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous_kernel();  // in every block: what follows in the stream relies on it
  if (blockIdx.x >= folds || row >= fold.tokens * p.group) return;
  constexpr int kPairs = D / 64, kAhead = D == 256 ? 4 : 6;
  const int64_t base = static_cast<int64_t>(fold.slot) * p.slot_rows + row;
  float2 value[kPairs];
  const auto load = [&](float2(&to)[kPairs], int64_t at) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) to[i] = *reinterpret_cast<const float2*>(p.partial + at * D + 64 * i + 2 * lane);
  };
  load(value, base);
  RowState total{p.partial_ml[base].x, p.partial_ml[base].y};
  for (int k = 1; k < fold.slots; k += kAhead) {
    float2 chunk[kAhead][kPairs], ml[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (k + i < fold.slots) {
        const int64_t at = base + static_cast<int64_t>(k + i) * p.slot_rows;
        load(chunk[i], at);
        ml[i] = p.partial_ml[at];
      }
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (k + i < fold.slots) {
        const FoldFactors f = fold_row(total, ml[i].x, ml[i].y, p.c);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          value[j].x = fold_value(value[j].x, chunk[i][j].x, f);
          value[j].y = fold_value(value[j].y, chunk[i][j].y, f);
        }
      }
    }
  }
  const FoldRow<T> at{p, fold, row};
  const float2 f = at.finish(total, lane == 0);
  T* out = at.out();
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int column = 64 * i + 2 * lane;
    if (column < p.value_size) *reinterpret_cast<uint32_t*>(out + column) = at.round(value[i].x, value[i].y, f);
  }
}

constexpr int kFoldColumns = 32;
// A block for 32 columns of a row, with 128 chunks in flight: for few rows of many chunks. The running
// maxima, and so the factors, are found by a scan (a maximum is exact in any order); values are folded in order.
template <class T, int D>
__global__ void __launch_bounds__(128) fold_columns(const __grid_constant__ Params p) {
  constexpr int kChunks = 128, kQuads = kFoldColumns / 4;
  __shared__ float values[kChunks][kFoldColumns];
  __shared__ float4 factors[kChunks];
  __shared__ float warp_maximum[4];
  const int folds = p.plan[kPlanFolds];
  const AttentionFold fold = p.folds[blockIdx.x];
  const int row = blockIdx.y, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  wait_for_previous_kernel();  // in every block: what follows in the stream relies on it
  if (blockIdx.x >= folds || row >= fold.tokens * p.group) return;
  const int first_column = blockIdx.z * kFoldColumns, column = thread % kFoldColumns;
  const int64_t base = static_cast<int64_t>(fold.slot) * p.slot_rows + row;
  RowState total{p.partial_ml[base].x, p.partial_ml[base].y};
  float value = p.partial[base * D + first_column + column];
  for (int k = 1; k < fold.slots; k += kChunks) {
    const int count = min(kChunks, fold.slots - k), mine = thread / kQuads;
    float4 loaded[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int chunk = mine + 128 / kQuads * j;
      if (chunk < count) {
        loaded[j] = *(reinterpret_cast<const float4*>(
                          p.partial + (base + static_cast<int64_t>(k + chunk) * p.slot_rows) * D + first_column) +
                      thread % kQuads);
      }
    }
    const float2 ml = thread < count ? p.partial_ml[base + static_cast<int64_t>(k + thread) * p.slot_rows]
                                     : make_float2(minus_infinity(), 0.0f);
    float largest = ml.x;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, largest, step);
      if (lane >= step) largest = fmaxf(largest, other);
    }
    if (lane == 31) warp_maximum[warp] = largest;
    const float before = __shfl_up_sync(~0u, largest, 1);
    __syncthreads();
    float m = total.m;
    for (int w = 0; w < warp; ++w) m = fmaxf(m, warp_maximum[w]);
    if (lane > 0) m = fmaxf(m, before);
    RowState running{m, 0.0f};
    const FoldFactors f = fold_row(running, ml.x, 0.0f, p.c);
    factors[thread] = make_float4(f.before, f.chunk, ml.y, 0.0f);
    for (int w = 0; w < 4; ++w) total.m = fmaxf(total.m, warp_maximum[w]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int chunk = mine + 128 / kQuads * j;
      if (chunk < count) *(reinterpret_cast<float4*>(values[chunk]) + thread % kQuads) = loaded[j];
    }
    __syncthreads();
    if (thread < kFoldColumns) {
#pragma unroll 8
      for (int i = 0; i < count; ++i) {
        const float4 f = factors[i];
        total.l = __fmaf_rn(f.z, f.y, __fmul_rn(total.l, f.x));
        value = fold_value(value, values[i][column], {f.x, f.y});
      }
    }
    __syncthreads();
  }
  if (thread >= kFoldColumns) return;
  const FoldRow<T> at{p, fold, row};
  const float2 f = at.finish(total, first_column == 0 && thread == 0);
  if (first_column + column < p.value_size) {
    const uint32_t bits = at.round(value, 0.0f, f);
    reinterpret_cast<uint16_t*>(at.out())[first_column + column] = static_cast<uint16_t>(bits);
  }
}

void launch(void (*kernel)(Params), dim3 grid, const Params& p, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(128);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check(cudaLaunchKernelEx(&config, kernel, p), "attention fold");
}

template <class T, int D>
void launch_size(const Params& p, int64_t folds, cudaStream_t stream) {
  const auto count = static_cast<unsigned>(folds), rows = static_cast<unsigned>(p.slot_rows);
  if (folds * rows > 512) {
    launch(fold_rows<T, D>, dim3(count, (rows + 3) / 4), p, stream);
  } else {
    launch(fold_columns<T, D>, dim3(count, rows, D / 32), p, stream);
  }
}

}  // namespace

template <class T>
void launch_fold(int d, const Params& p, int64_t folds, cudaStream_t stream) {
  switch (d) {
    case 64:
      return launch_size<T, 64>(p, folds, stream);
    case 128:
      return launch_size<T, 128>(p, folds, stream);
    default:
      return launch_size<T, 256>(p, folds, stream);
  }
}
template void launch_fold<BFloat16>(int, const Params&, int64_t, cudaStream_t);
template void launch_fold<Float16>(int, const Params&, int64_t, cudaStream_t);

}  // namespace quartz::kernels::cuda::attention_kernels
