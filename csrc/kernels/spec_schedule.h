// How many of its drafts each request gets verified. c[r][j] is the confidence that draft j of request r is accepted if
// those before it were; a[r][j] = c[r][0] * ... * c[r][j], multiplied in float in this order, is the chance that it is.
// With the (r, j) sorted by a descending, ties by r * drafts + j, the first B are verified, where B is the smallest
// that makes (requests + a_1 + ... + a_B) / step_times[requests + B] largest: expected tokens over the time of the
// step. The sums are exact integers in units of 2^-40, the quotients doubles. Confidences below 0 or NaN count as 0,
// above 1 as 1. Numbers of rows that step_times does not reach, or whose time is not above 0, are not chosen; if there
// is none, nothing is verified.
#pragma once

#include "kernels/dtype.h"
#include "kernels/isa.h"
#include "kernels/parallel.h"

namespace quartz::kernels {

struct SpecSchedule {
  const float* confidences;  // (requests, drafts), contiguous
  const int64_t* available;  // how many drafts each request has; null: all
  const float* step_times;   // of 0, 1, ... rows
  int64_t requests, drafts, steps;
  int64_t* lengths;  // result, one a request
};

constexpr int64_t kMaxScheduled = 16384;  // requests * drafts, what a block of CUDA can sort

// Sorted descending: a, then the lower index first; 0 is no draft.
QUARTZ_HD uint64_t schedule_key(float chance, int64_t index) {
  return (static_cast<uint64_t>(bits_of_float(chance)) + 1) << 32 |
         static_cast<uint32_t>(~static_cast<uint32_t>(index));
}
QUARTZ_HD float schedule_chance(uint64_t key) { return float_of_bits(static_cast<uint32_t>((key >> 32) - 1)); }
QUARTZ_HD int64_t schedule_index(uint64_t key) { return ~static_cast<uint32_t>(key); }

QUARTZ_HD void schedule_keys(const SpecSchedule& a, int64_t request, uint64_t* keys) {
  const int64_t available = a.available != nullptr ? a.available[request] : a.drafts;
  float chance = 1.0f;
  for (int64_t j = 0; j < a.drafts; ++j) {
    const float confidence = a.confidences[request * a.drafts + j];
    chance *= confidence > 0.0f ? (confidence < 1.0f ? confidence : 1.0f) : 0.0f;
    keys[request * a.drafts + j] = j < available ? schedule_key(chance, request * a.drafts + j) : 0;
  }
}
QUARTZ_HD uint64_t schedule_mass(float chance) { return static_cast<uint64_t>(chance * 0x1p+40f); }

// Expected tokens over time if `count` drafts are verified, -1 where that must not be chosen.
QUARTZ_HD double schedule_gain(const SpecSchedule& a, int64_t count, uint64_t mass) {
  const int64_t rows = a.requests + count;
  const float time = rows < a.steps ? a.step_times[rows] : 0.0f;
  if (!(time > 0.0f)) return -1.0;
  return static_cast<double>((static_cast<uint64_t>(a.requests) << 40) + mass) / static_cast<double>(time);
}

QUARTZ_CPU_KERNEL(void, spec_schedule, (const SpecSchedule& a), (a))

#ifdef QUARTZ_WITH_CUDA
namespace cuda {
void spec_schedule(const SpecSchedule& a, void* stream);
}  // namespace cuda
#endif

}  // namespace quartz::kernels
