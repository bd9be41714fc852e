// Sampling of tokens from logits, one row a request. Steps, in this order, all in float:
//   1. x = logit; NaN counts as -inf, +inf as the largest finite number (after every step that changes x);
//   2. a token whose bit of `bitmask` is 0 becomes -inf;
//   3. x += bias, the values of entries with the token's id added up in their order first;
//   4. penalties: where the token is in the prompt or was generated (count > 0), x = x > 0 ? x / repetition
//      : x * repetition; then x = x - frequency * count, and x = x - presence where count > 0;
//   5. temperature: z = (x - max x) * (1 / temperature). Temperatures that are not above 1e-30 mean the largest x;
//   6. min-p: tokens with z >= log(min_p) stay; 7. top-k: the first k stay; 8. top-p: with mass(z) = exp(z) cut off to
//      multiples of 2^-40 and S the sum over the tokens that are left, tokens before which less than p * S lies stay;
//   9. the token is the largest z + Gumbel noise (philox.h) among those left.
// The order of tokens, for steps 7, 8 and every tie, is (x descending, id ascending). Masses are 64-bit integers, so
// their sums have no order; nothing depends on other rows. -inf is never drawn; a row in which nothing is left gives
// token -1 and logprobs -inf. Logprobs: z - log(S) with S of the tokens left (processed), or of step 1's x at
// temperature 1 (raw).
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"
#include "kernels/philox.h"

namespace quartz::kernels {

struct Sample {
  const void* logits;  // rows of `vocabulary` elements, `stride` elements apart
  DType dtype;
  int64_t rows, vocabulary, stride;

  // One value a row; null means that the step is left out (temperature: 1; seeds, positions, samples: 0).
  const float *temperature, *top_p, *min_p, *repetition, *frequency, *presence;
  const int64_t *top_k, *seeds, *positions, *samples;

  const int32_t* bitmask;  // bit id % 32 of word id / 32 is 1 where the token is allowed; `bitmask_stride` words a row
  int64_t bitmask_stride;
  const int64_t* bias_ids;  // `bias_width` entries a row; ids outside the vocabulary are passed over
  const float* bias_values;
  int64_t bias_width;
  const int32_t* counts;       // how often each token was generated, `counts_stride` elements a row
  const int32_t* prompt_mask;  // bits like `bitmask`: the tokens of the prompt
  int64_t counts_stride, prompt_stride;
  const int64_t* slots;    // the row of `counts` and `prompt_mask` that belongs to a row, none if there is no such row;
  int64_t slot_count;      // null: its own number
  const int64_t* pending;  // `pending_width` tokens a row that count as generated too (the drafts in front of it)
  int64_t pending_width;

  // Results, null where not wanted.
  int64_t* tokens;
  float *raw_logprobs, *logprobs;
  int64_t* top_ids;  // `top_n` a row, by (x descending, id ascending), of step 1's x; -1 and -inf where there are fewer
  float* top_logprobs;
  int64_t top_n;

  void* workspace;  // of sample_workspace() bytes; CUDA only, not needed by others
};

constexpr int64_t kMaxSampleVocabulary = int64_t{1} << 24;  // the sum of so many masses fits 64 bits
constexpr int64_t kMaxTopLogprobs = 256;
constexpr float kLargest = 0x1.fffffep+127f, kMinusInfinity = -__builtin_inff();
constexpr float kGreedyBelow = 1e-30f;
// Below it exp(z) has no mass: exp(-28) < 2^-40.
constexpr float kMasslessBelow = -28.0f;

QUARTZ_HD float sanitized(float x) {
  x = x != x ? kMinusInfinity : x;
  return (x > kLargest ? kLargest : x) + 0.0f;  // and no -0
}

struct Penalties {
  float repetition = 1.0f, frequency = 0.0f, presence = 0.0f;
};

// Steps 1 to 4 of one token. `bias` is the sum of its entries.
QUARTZ_HD float processed(float x, bool allowed, bool has_bias, float bias, bool in_prompt, int64_t count,
                          const Penalties& penalties) {
  x = sanitized(x);
  if (!allowed) x = kMinusInfinity;
  if (has_bias) x = sanitized(x + bias);
  if (in_prompt || count > 0) x = sanitized(x > 0.0f ? x / penalties.repetition : product(x, penalties.repetition));
  if (count > 0) {
    x = sanitized(x - product(penalties.frequency, static_cast<float>(count)));
    x = sanitized(x - penalties.presence);
  }
  return x;
}

QUARTZ_HD bool bit_of(const int32_t* words, int64_t id) {
  return (static_cast<uint32_t>(words[id >> 5]) >> (id & 31)) & 1u;
}

// Whether steps 2 to 4 have inputs for every token, or for listed ones.
QUARTZ_HD bool has_dense(const Sample& a) {
  return a.bitmask != nullptr || a.counts != nullptr || a.prompt_mask != nullptr;
}
QUARTZ_HD bool has_sparse(const Sample& a) { return a.bias_width > 0 || a.pending_width > 0; }

// What steps 1 to 4 need of one row.
struct RowInputs {
  const int32_t *bitmask = nullptr, *counts = nullptr, *prompt_mask = nullptr;
  const int64_t *bias_ids = nullptr, *pending = nullptr;
  const float* bias_values = nullptr;
  int64_t bias_width = 0, pending_width = 0;
  Penalties penalties;

  RowInputs() = default;
  QUARTZ_HD RowInputs(const Sample& a, int64_t row) {
    if (a.bitmask != nullptr) bitmask = a.bitmask + row * a.bitmask_stride;
    const int64_t slot = a.slots != nullptr ? a.slots[row] : row;
    const bool known = slot >= 0 && slot < a.slot_count;
    if (a.counts != nullptr && known) counts = a.counts + slot * a.counts_stride;
    if (a.prompt_mask != nullptr && known) prompt_mask = a.prompt_mask + slot * a.prompt_stride;
    if (a.bias_ids != nullptr) {
      bias_ids = a.bias_ids + row * a.bias_width;
      bias_values = a.bias_values + row * a.bias_width;
      bias_width = a.bias_width;
    }
    if (a.pending != nullptr) {
      pending = a.pending + row * a.pending_width;
      pending_width = a.pending_width;
    }
    if (a.repetition != nullptr) penalties.repetition = a.repetition[row];
    if (a.frequency != nullptr) penalties.frequency = a.frequency[row];
    if (a.presence != nullptr) penalties.presence = a.presence[row];
  }

  // Without bias and pending tokens.
  QUARTZ_HD float dense_value(float x, int64_t id) const {
    return processed(x, bitmask == nullptr || bit_of(bitmask, id), false, 0.0f,
                     prompt_mask != nullptr && bit_of(prompt_mask, id), counts != nullptr ? counts[id] : 0, penalties);
  }
  QUARTZ_HD float value(float x, int64_t id) const {
    bool has_bias = false;
    float bias = 0.0f;
    for (int64_t i = 0; i < bias_width; ++i) {
      if (bias_ids[i] != id) continue;
      bias = has_bias ? bias + bias_values[i] : bias_values[i];
      has_bias = true;
    }
    int64_t count = counts != nullptr ? counts[id] : 0;
    for (int64_t i = 0; i < pending_width; ++i) count += pending[i] == id;
    return processed(x, bitmask == nullptr || bit_of(bitmask, id), has_bias, bias,
                     prompt_mask != nullptr && bit_of(prompt_mask, id), count, penalties);
  }
};

// Steps 5 to 8 of one row.
struct RowRules {
  float inverse_temperature = 1.0f;
  bool greedy = false;
  float lowest_z = kMinusInfinity;  // log(min_p)
  int64_t top_k = 0;                // 0: all
  float top_p = 1.0f;

  RowRules() = default;
  QUARTZ_HD RowRules(const Sample& a, int64_t row) {
    if (a.temperature != nullptr) {
      const float temperature = a.temperature[row];
      greedy = !(temperature > kGreedyBelow);
      if (!greedy) inverse_temperature = 1.0f / temperature;
    }
    if (greedy) return;
    if (a.min_p != nullptr && a.min_p[row] > 0.0f) {
      const float min_p = a.min_p[row];
      lowest_z = min_p < 1.0f ? log_f32(min_p) : 0.0f;
    }
    if (a.top_k != nullptr && a.top_k[row] > 0 && a.top_k[row] < a.vocabulary) top_k = a.top_k[row];
    if (a.top_p != nullptr && a.top_p[row] < 1.0f) top_p = a.top_p[row] > 0.0f ? a.top_p[row] : 0.0f;
  }
};

QUARTZ_HD float scaled(float x, float largest, float inverse_temperature) {
  return product(x - largest, inverse_temperature);
}

// exp(z) in units of 2^-40, for z <= 0.
QUARTZ_HD uint64_t mass_of(float z) {
  const float high = exp_f32(z) * 0x1p+20f;
  const auto whole = static_cast<int32_t>(high);
  const auto rest = static_cast<int32_t>((high - static_cast<float>(whole)) * 0x1p+20f);
  return (static_cast<uint64_t>(static_cast<uint32_t>(whole)) << 20) + static_cast<uint32_t>(rest);
}
QUARTZ_HD float log_of_mass(uint64_t sum) { return log_f32(static_cast<float>(sum) * 0x1p-40f); }

// The mass that must not lie before a token, at least 1: the first token always stays.
QUARTZ_HD uint64_t mass_limit(float top_p, uint64_t sum) {
  const auto limit = static_cast<uint64_t>(static_cast<double>(top_p) * static_cast<double>(sum));
  return limit > 0 ? limit : 1;
}

// Unsigned integers in the order of the floats (no NaN, no -0).
QUARTZ_HD uint32_t order_of(float x) {
  const uint32_t bits = bits_of_float(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
QUARTZ_HD float float_of_order(uint32_t order) {
  return float_of_bits(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// The smallest x with z(x) >= lowest_z, by bisection: z grows with x.
QUARTZ_HD float lowest_value(float largest, float inverse_temperature, float lowest_z) {
  uint32_t low = order_of(-kLargest), high = order_of(largest);
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    if (scaled(float_of_order(middle), largest, inverse_temperature) >= lowest_z) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return float_of_order(low);
}

// Where a truncated row ends: tokens with x > value stay, and those with x == value up to the id.
struct Cut {
  float value = -kLargest;
  uint32_t id = 0xffffffffu;

  QUARTZ_HD bool keeps(float x, uint32_t token) const { return (x > value) | ((x == value) & (token <= id)); }
};

QUARTZ_CPU_KERNEL(void, sample, (const Sample& a, const Parallel& parallel), (a, parallel))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
int64_t sample_workspace(int64_t rows, int64_t vocabulary);  // bytes
void sample(const Sample& a, void* stream);
void sample_with(const Sample& a, int blocks_of_a_row, void* stream);  // for measuring
}  // namespace cuda
#endif

}  // namespace quartz::kernels
