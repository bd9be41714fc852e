#include "kernels/moe_topk.h"

#include <limits>

#include "kernels/cpu/simd.h"

namespace quartz::kernels::QUARTZ_ISA {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

float sum_of_32(float* sums) {
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

void softmax(float* values, int64_t count) {
  float largest = kLowest;
  for (int64_t e = 0; e < count; ++e) largest = values[e] > largest ? values[e] : largest;
  float sums[32] = {};
  for (int64_t e = 0; e < count; ++e) {
    values[e] = exp_f32(values[e] - largest);
    sums[e % 32] += values[e];
  }
  const float total = sum_of_32(sums);
  for (int64_t e = 0; e < count; ++e) values[e] = values[e] / total;
}

// The largest choices, kept sorted by (choice descending, id ascending) while ids come in ascending order.
class Selection {
 public:
  explicit Selection(int64_t size) : size_(size) {}
  void offer(float choice, int64_t id) {
    if (filled_ == size_ && !(choice > choices_[size_ - 1])) return;
    int64_t place = filled_ < size_ ? filled_++ : size_ - 1;
    for (; place > 0 && choice > choices_[place - 1]; --place) {
      choices_[place] = choices_[place - 1];
      ids_[place] = ids_[place - 1];
    }
    choices_[place] = choice;
    ids_[place] = id;
  }
  int64_t id(int64_t rank) const { return ids_[rank]; }
  float choice(int64_t rank) const { return choices_[rank]; }

 private:
  int64_t size_, filled_ = 0;
  float choices_[kMaxSelected];
  int64_t ids_[kMaxSelected];
};

// kept[g]: group g stays. Equal groups: the lower one.
void keep_groups(const MoeTopk& a, const float* choices, bool* kept) {
  const int64_t size = a.experts / a.groups;
  float scores[kMaxExperts];
  for (int64_t g = 0; g < a.groups; ++g) {
    float first = kLowest, second = kLowest;
    for (int64_t e = g * size; e < (g + 1) * size; ++e) {
      if (choices[e] > first) {
        second = first;
        first = choices[e];
      } else if (choices[e] > second) {
        second = choices[e];
      }
    }
    scores[g] = a.group_score == GroupScore::kMax || size == 1 ? first : first + second;
    kept[g] = false;
  }
  for (int64_t n = 0; n < a.kept_groups; ++n) {
    int64_t best = -1;
    for (int64_t g = 0; g < a.groups; ++g) {
      if (!kept[g] && (best < 0 || scores[g] > scores[best])) best = g;
    }
    kept[best] = true;
  }
}

template <class T>
void route(const MoeTopk& a, int64_t row) {
  float scores[kMaxExperts], choices[kMaxExperts];
  const T* logits = static_cast<const T*>(a.logits) + row * a.stride;
  for (int64_t e = 0; e < a.experts; ++e) scores[e] = kernels::to_float(logits[e]);
  switch (a.scoring) {
    case Scoring::kSoftmax:
      softmax(scores, a.experts);
      break;
    case Scoring::kSigmoid:
      for (int64_t e = 0; e < a.experts; ++e) scores[e] = sigmoid_f32(scores[e]);
      break;
    case Scoring::kSqrtSoftplus:
      for (int64_t e = 0; e < a.experts; ++e) scores[e] = __builtin_sqrtf(softplus_f32(scores[e]));
      break;
    case Scoring::kSoftmaxSelected:
      break;
  }

  int64_t* ids = a.ids + row * a.k;
  if (a.given != nullptr) {
    for (int64_t j = 0; j < a.k; ++j) {
      const int64_t id = a.given[row * a.k + j];
      ids[j] = id >= 0 && id < a.experts ? id : -1;
    }
  } else {
    for (int64_t e = 0; e < a.experts; ++e) {
      const float choice = a.bias != nullptr ? scores[e] + a.bias[e] : scores[e];
      choices[e] = choice == choice ? choice : kLowest;
    }
    bool kept[kMaxExperts];
    const bool limited = a.kept_groups < a.groups;
    if (limited) keep_groups(a, choices, kept);
    Selection selection(a.k);
    const int64_t size = a.experts / a.groups;
    for (int64_t e = 0; e < a.experts; ++e) {
      if (!limited || kept[e / size]) selection.offer(choices[e], e);
    }
    for (int64_t j = 0; j < a.k; ++j) ids[j] = selection.id(j);
  }

  float* weights = a.weights + row * a.k;
  for (int64_t j = 0; j < a.k; ++j) weights[j] = ids[j] < 0 ? 0.0f : scores[ids[j]];
  if (a.scoring == Scoring::kSoftmaxSelected) {
    float largest = kLowest;
    for (int64_t j = 0; j < a.k; ++j) {
      if (ids[j] >= 0) largest = weights[j] > largest ? weights[j] : largest;
    }
    for (int64_t j = 0; j < a.k; ++j) weights[j] = ids[j] < 0 ? 0.0f : exp_f32(weights[j] - largest);
  }
  if (a.renormalise || a.scoring == Scoring::kSoftmaxSelected) {
    float total = 0.0f;
    for (int64_t j = 0; j < a.k; ++j) total += weights[j];
    total += a.epsilon;
    for (int64_t j = 0; j < a.k; ++j) weights[j] = ids[j] < 0 ? 0.0f : weights[j] / total;
  }
  for (int64_t j = 0; j < a.k; ++j) weights[j] = weights[j] * a.scale;
}

}  // namespace

void moe_topk(const MoeTopk& a, const Parallel& parallel) {
  parallel.run(a.rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      switch (a.dtype) {
        case DType::kFloat32:
          route<float>(a, row);
          break;
        case DType::kFloat16:
          route<Float16>(a, row);
          break;
        case DType::kBFloat16:
          route<BFloat16>(a, row);
          break;
      }
    }
  });
}

}  // namespace quartz::kernels::QUARTZ_ISA
