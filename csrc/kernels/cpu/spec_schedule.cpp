#include "kernels/spec_schedule.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace quartz::kernels::QUARTZ_ISA {

void spec_schedule(const SpecSchedule& a) {
  std::vector<uint64_t> keys(static_cast<size_t>(a.requests * a.drafts));
  for (int64_t r = 0; r < a.requests; ++r) schedule_keys(a, r, keys.data());
  std::sort(keys.begin(), keys.end(), std::greater<uint64_t>());
  while (!keys.empty() && keys.back() == 0) keys.pop_back();
  uint64_t mass = 0;
  double best = schedule_gain(a, 0, 0);
  int64_t chosen = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    mass += schedule_mass(schedule_chance(keys[i]));
    const double gain = schedule_gain(a, static_cast<int64_t>(i) + 1, mass);
    if (gain > best) {
      best = gain;
      chosen = static_cast<int64_t>(i) + 1;
    }
  }
  std::fill(a.lengths, a.lengths + a.requests, 0);
  for (int64_t i = 0; i < chosen; ++i) ++a.lengths[schedule_index(keys[static_cast<size_t>(i)]) / a.drafts];
}

}  // namespace quartz::kernels::QUARTZ_ISA
