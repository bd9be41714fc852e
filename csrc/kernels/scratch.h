// Working memory of CPU kernels: kept by each thread between calls, so that a call costs no page faults.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quartz::kernels {

// At least `bytes` of memory, aligned to 64, until the object ends. Two that live at once on one thread need different
// slots. A thread keeps at most 32 MiB a slot.
class Scratch {
 public:
  enum Slot { kRows, kPanels, kTotals, kSlots };
  Scratch(Slot slot, int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* floats() const { return static_cast<float*>(memory_); }

 private:
  Slot slot_;
  void* memory_;
};

}  // namespace quartz::kernels
