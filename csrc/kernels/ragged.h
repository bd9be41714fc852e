#pragma once

#include <cstdint>

namespace quartz::kernels {

// Which size of a batch's products differs: product b has the elements offsets[b - 1] (0 for the first) to offsets[b]
// of that dimension of the tensors that have it, and the `batch` strides of the others.
enum class Ragged : uint8_t { kNone, kM, kN, kK };

}  // namespace quartz::kernels
