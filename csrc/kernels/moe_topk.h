// Routing of a mixture-of-experts layer: scores from router logits, the k experts of each token, their weights.
//
//   scores   softmax over all experts, sigmoid, or sqrt(softplus); for softmax_selected the logits themselves, and the
//            softmax is taken over the selected ones
//   choice   scores + bias (score correction; it chooses but does not weigh), NaN counted as minus infinity
//   groups   experts come in `groups` equal groups, of which the `kept_groups` best stay: by their largest choice, or
//   by
//            the sum of their two largest
//   ids      the k largest choices, in descending order; equal ones: the lower id first. Always k different experts.
//   weights  score of the selected / (their sum + epsilon) if renormalised, times scale
//
// Order of arithmetic, the same on CPU and CUDA and a function of the number of experts alone: softmax with 32 partial
// sums, sum j over the experts j, j + 32, ... ascending, added by the tree i + 16, 8, 4, 2, 1; own exp and log
// (elementary.h); the selected are summed in the order of their rank.
#pragma once

#include "kernels/elementary.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

enum class Scoring : uint8_t { kSoftmax, kSigmoid, kSqrtSoftplus, kSoftmaxSelected };
enum class GroupScore : uint8_t { kMax, kSumOfTwo };

constexpr int64_t kMaxExperts = 1024;  // a warp keeps 32 a lane
constexpr int64_t kMaxSelected = 64;

struct MoeTopk {
  const void* logits;    // rows of `experts` elements, `stride` elements apart
  const float* bias;     // `experts` elements, or null
  const int64_t* given;  // [rows, k]: experts chosen by the caller, or null; ids of no expert become -1 with weight 0
  int64_t* ids;          // [rows, k]
  float* weights;        // [rows, k]
  int64_t rows, experts, stride, k, groups, kept_groups;
  float epsilon, scale;
  Scoring scoring;
  GroupScore group_score;
  bool renormalise;
  DType dtype;
};

QUARTZ_HD float sigmoid_f32(float x) { return 1.0f / (1.0f + exp_f32(-x)); }

// log(1 + e^x) without loss for very negative x: log(u) e / (u - 1) corrects the rounding of u = 1 + e.
QUARTZ_HD float softplus_f32(float x) {
  if (x > 20.0f) return x;  // e^-x is below half an ulp
  const float e = exp_f32(x), u = 1.0f + e;
  return u == 1.0f ? e : log_f32(u) * (e / (u - 1.0f));
}

QUARTZ_CPU_KERNEL(void, moe_topk, (const MoeTopk& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void moe_topk(const MoeTopk& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
