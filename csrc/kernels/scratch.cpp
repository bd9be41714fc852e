#include "kernels/scratch.h"

#include <new>

namespace quartz::kernels {
namespace {

constexpr int64_t kMostKept = int64_t{32} << 20;
constexpr std::align_val_t kAlignment{64};

struct Kept {
  void* memory[Scratch::kSlots] = {};
  int64_t bytes[Scratch::kSlots] = {};
  ~Kept() {
    for (void* one : memory) ::operator delete(one, kAlignment);
  }
};
thread_local Kept kept;

}  // namespace

Scratch::Scratch(Slot slot, int64_t bytes) : slot_(slot) {
  if (kept.bytes[slot] < bytes) {
    ::operator delete(kept.memory[slot], kAlignment);
    kept.memory[slot] = nullptr;
    kept.bytes[slot] = 0;
    kept.memory[slot] = ::operator new(static_cast<size_t>(bytes), kAlignment);
    kept.bytes[slot] = bytes;
  }
  memory_ = kept.memory[slot];
}

Scratch::~Scratch() {
  if (kept.bytes[slot_] <= kMostKept) return;
  ::operator delete(kept.memory[slot_], kAlignment);
  kept.memory[slot_] = nullptr;
  kept.bytes[slot_] = 0;
}

}  // namespace quartz::kernels
