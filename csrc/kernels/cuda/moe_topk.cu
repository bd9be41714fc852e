// One warp a token; lane i holds the experts i, i + 32, ... in registers.
#include "kernels/moe_topk.h"

#include <limits>

#include "kernels/cuda/launch.h"
#include "kernels/row_reduce.h"

namespace quartz::kernels::cuda {
namespace {

constexpr unsigned kWarp = 0xffffffffu;
constexpr int kWarpsPerBlock = 4;
constexpr int kNone = std::numeric_limits<int>::max();  // no expert: behind every id

__device__ __forceinline__ float lowest() { return -__int_as_float(0x7f800000); }

__device__ __forceinline__ float load(const void* logits, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(logits)[index];
    case DType::kFloat16:
      return to_float(static_cast<const Float16*>(logits)[index]);
    default:
      return to_float(static_cast<const BFloat16*>(logits)[index]);
  }
}

__device__ __forceinline__ float warp_max(float value) {  // NaN is passed over, as in the CPU's comparison
  for (int step = 16; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kWarp, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// The tree i + 16, 8, 4, 2, 1 over the lanes; lane 0 has the sum, which all get.
__device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_down_sync(kWarp, value, step);
  return __shfl_sync(kWarp, value, 0);
}

// Bit i: the group of this lane's expert i * 32 + lane does not stay. The choices of a row go through shared memory.
template <int PER_LANE>
__device__ uint32_t dropped_experts(const MoeTopk& a, const float (&choice)[PER_LANE], float* shared, int lane) {
  const int experts = static_cast<int>(a.experts), groups = static_cast<int>(a.groups), size = experts / groups;
  float* group_scores = shared + kMaxExperts;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (i * 32 + lane < experts) shared[i * 32 + lane] = choice[i];
  }
  __syncwarp();
  for (int g = lane; g < groups; g += 32) {
    float first = lowest(), second = lowest();
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const float value = shared[e];
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    group_scores[g] = a.group_score == GroupScore::kMax || size == 1 ? first : first + second;
  }
  __syncwarp();
  uint32_t dropped = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = i * 32 + lane;
    if (e >= experts) continue;
    const int mine = e / size;
    int better = 0;  // groups that come before mine
    for (int g = 0; g < groups; ++g) {
      const float other = group_scores[g];
      better += other > group_scores[mine] || (other == group_scores[mine] && g < mine) ? 1 : 0;
    }
    if (better >= a.kept_groups) dropped |= 1u << i;
  }
  return dropped;
}

template <int PER_LANE>
__global__ void __launch_bounds__(kWarpsPerBlock * 32) route(const MoeTopk a) {
  extern __shared__ float shared_memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (row >= a.rows) return;
  const int experts = static_cast<int>(a.experts), k = static_cast<int>(a.k);

  float score[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const int e = i * 32 + lane;
    score[i] = e < experts ? load(a.logits, row * a.stride + e, a.dtype) : lowest();
  }
  if (a.scoring == Scoring::kSoftmax) {
    float largest = lowest();
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) largest = score[i] > largest ? score[i] : largest;
    largest = warp_max(largest);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      if (i * 32 + lane < experts) {
        score[i] = exp_f32(score[i] - largest);
        sum += score[i];
      }
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) score[i] = score[i] / sum;
  } else if (a.scoring == Scoring::kSigmoid) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) score[i] = sigmoid_f32(score[i]);
  } else if (a.scoring == Scoring::kSqrtSoftplus) {
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) score[i] = __fsqrt_rn(softplus_f32(score[i]));
  }

  // Lane j keeps the ids and weights of the ranks j and j + 32.
  int id[2] = {-1, -1};
  float weight[2];
  if (a.given != nullptr) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int j = h * 32 + lane;
      const int64_t given = j < k ? a.given[row * k + j] : -1;
      id[h] = given >= 0 && given < experts ? static_cast<int>(given) : -1;
    }
  } else {
    float choice[PER_LANE];
    uint32_t barred = 0;  // bit i: this lane's expert i * 32 + lane cannot be chosen
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int e = i * 32 + lane;
      choice[i] = a.bias != nullptr && e < experts ? score[i] + a.bias[e] : score[i];
      choice[i] = choice[i] == choice[i] ? choice[i] : lowest();
      if (e >= experts) barred |= 1u << i;
    }
    if (a.kept_groups < a.groups) {
      barred |= dropped_experts<PER_LANE>(a, choice, shared_memory + warp * 2 * kMaxExperts, lane);
    }
    // Ascending keys are ascending choices; 0, which no number has, is an expert that cannot be chosen (any more).
    uint32_t key[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) key[i] = (barred >> i & 1u) != 0 ? 0u : ordered_bits(choice[i]);
    for (int j = 0; j < k; ++j) {
      uint32_t best = 0;
      int mine = kNone;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        if (key[i] > best) {
          best = key[i];
          mine = i * 32 + lane;
        }
      }
      // The largest key of the warp; of equal ones the lower id.
      const int best_id = __reduce_min_sync(kWarp, __reduce_max_sync(kWarp, best) == best ? mine : kNone);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        if (best_id == i * 32 + lane) key[i] = 0;
      }
      if (j % 32 == lane) {
        if (j < 32) {
          id[0] = best_id;
        } else {
          id[1] = best_id;
        }
      }
    }
  }

  // The score of a selected expert is in one register of one lane.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int wanted = id[h] < 0 ? 0 : id[h];
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const float value = __shfl_sync(kWarp, score[i], wanted % 32);
      if (wanted / 32 == i) found = value;
    }
    weight[h] = id[h] < 0 ? 0.0f : found;
  }
  if (a.scoring == Scoring::kSoftmaxSelected) {
    float largest = lowest();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (id[h] >= 0 && weight[h] > largest) largest = weight[h];
    }
    largest = warp_max(largest);
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = id[h] < 0 ? 0.0f : exp_f32(weight[h] - largest);
  }
  if (a.renormalise || a.scoring == Scoring::kSoftmaxSelected) {
    float total = 0.0f;
    for (int j = 0; j < k; ++j) total += __shfl_sync(kWarp, j < 32 ? weight[0] : weight[1], j % 32);
    total += a.epsilon;
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] = id[h] < 0 ? 0.0f : weight[h] / total;
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int j = h * 32 + lane;
    if (j < k) {
      a.ids[row * k + j] = id[h];
      a.weights[row * k + j] = weight[h] * a.scale;
    }
  }
}

template <int PER_LANE>
void run(const MoeTopk& a, void* stream) {
  const auto blocks = static_cast<unsigned>((a.rows + kWarpsPerBlock - 1) / kWarpsPerBlock);
  const int shared = a.kept_groups < a.groups ? kWarpsPerBlock * 2 * static_cast<int>(kMaxExperts * sizeof(float)) : 0;
  launch(route<PER_LANE>, {dim3(blocks), kWarpsPerBlock * 32, shared}, stream, a);
}

}  // namespace

void moe_topk(const MoeTopk& a, void* stream) {
  if (a.rows == 0) return;
  const int64_t per_lane = (a.experts + 31) / 32;
  if (per_lane <= 1) return run<1>(a, stream);
  if (per_lane <= 2) return run<2>(a, stream);
  if (per_lane <= 4) return run<4>(a, stream);
  if (per_lane <= 8) return run<8>(a, stream);
  if (per_lane <= 16) return run<16>(a, stream);
  run<32>(a, stream);
}

}  // namespace quartz::kernels::cuda
