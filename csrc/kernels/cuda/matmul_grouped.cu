// Products of groups: the groups' tiles are made from the offsets by one kernel, another multiplies. Groups of rows
// with the layouts of the experts layer use its kernels, sums of groups the tiles of prefill, all else the general
// kernels.
#include "kernels/cuda/launch.h"
#include "kernels/cuda/matmul_kernels.h"
#include "kernels/cuda/moe_kernels.h"

namespace quartz::kernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr unsigned kTableBlocks = 64;

// What no group covers and has to become 0, as rows of bytes: rows [covered, size) or columns [covered, size).
struct Rest {
  void* out;
  int64_t row, rows, columns;  // stride and extents, in elements
  int element, size;           // bytes of an element; extent of the ragged dimension
  Ragged ragged;
};

template <class T>
QUARTZ_DEVICE void clear_rest(const Rest& rest, int covered) {
  const int64_t rows0 = rest.ragged == Ragged::kM ? covered : 0, columns0 = rest.ragged == Ragged::kN ? covered : 0;
  for (int64_t row = rows0 + blockIdx.x; row < rest.rows; row += gridDim.x)
    for (int64_t column = columns0 + threadIdx.x; column < rest.columns; column += kThreads)
      static_cast<T*>(rest.out)[row * rest.row + column] = T{0};
}

// Block 0 makes the tiles of at most `cap` elements of each group, or one entry a group if cap is 0; all clear the
// rest.
__global__ void __launch_bounds__(kThreads)
    table_kernel(const int32_t* offsets, int groups, int cap, int* count, MoeTile* tiles, Rest rest) {
  __shared__ int shared[kThreads];
  const int thread = threadIdx.x;
  // Over the threads, inclusive; `op` is associative.
  const auto scan = [&](int value, const auto& op) {
    __syncthreads();
    shared[thread] = value;
    __syncthreads();
    for (int i = 1; i < kThreads; i <<= 1) {
      const int other = thread >= i ? shared[thread - i] : value;
      __syncthreads();
      if (thread >= i) value = op(other, value);
      shared[thread] = value;
      __syncthreads();
    }
    return value;
  };
  const auto larger = [](int a, int b) { return max(a, b); };
  const auto sum = [](int a, int b) { return a + b; };
  int covered = 0, made = 0;  // up to this round of kThreads groups
  for (int first = 0; first < groups; first += kThreads) {
    const int g = first + thread;
    const int end = max(covered, scan(g < groups ? min(max(offsets[g], 0), rest.size) : 0, larger));
    __syncthreads();
    shared[thread] = end;
    __syncthreads();
    const int begin = thread == 0 ? covered : shared[thread - 1], length = g < groups ? end - begin : 0;
    covered = shared[kThreads - 1];
    if (blockIdx.x != 0) continue;
    if (cap == 0) {
      if (g < groups) tiles[g] = {g, begin, length, 0, 1};
      continue;
    }
    const int mine = (length + cap - 1) / cap, last = made + scan(mine, sum);
    for (int i = 0; i < mine; ++i) tiles[last - mine + i] = moe_tile(g, begin, length, cap, kMoeTogether, i);
    made += shared[kThreads - 1];
  }
  if (blockIdx.x == 0 && thread == 0) *count = made;
  if (rest.ragged == Ragged::kK) return;
  if (rest.element == 2)
    clear_rest<uint16_t>(rest, covered);
  else
    clear_rest<uint32_t>(rest, covered);
}

// Rows that the experts layer's kernels serve.
bool served_by_experts(const Matmul& a, Ragged ragged) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const bool shapes =
      ragged == Ragged::kM && a.dtype != DType::kFloat32 && a.k > 0 && a.k % 64 == 0 && a.n % 8 == 0 && a.alpha == 1.0f;
  const bool x = aligned(a.x) && a.x_k == 1 && a.x_row % 8 == 0 && a.x_row > 0;
  const bool w =
      aligned(a.w) && a.w_batch == a.n * a.k && ((a.w_k == 1 && a.w_row == a.k) || (a.w_row == 1 && a.w_k == a.n));
  return shapes && x && w && aligned(a.out) && a.out_row == a.n;
}
bool served_by_sums(const Matmul& a, Ragged ragged) {
  bool x_k_major = true, w_k_major = true;
  return ragged == Ragged::kK && a.dtype != DType::kFloat32 && a.m > 1 && a.n > 1 && a.k > 1 &&
         can_copy(a.x, 1, a.m, a.k, 0, a.x_row, a.x_k, x_k_major) &&
         can_copy(a.w, 1, a.n, a.k, 0, a.w_row, a.w_k, w_k_major) && !x_k_major && !w_k_major;
}

// Elements of a tile of the ragged dimension; 0 for sums, whose groups are not cut.
int cap_of(const Matmul& a, Ragged ragged) {
  if (ragged == Ragged::kK) return 0;
  if (!served_by_experts(a, ragged)) return kGeneralTile;
  return a.m <= kMoeDecodeRows * a.batch ? kMoeDecodeRows : 128;
}
int64_t ragged_size(const Matmul& a, Ragged ragged) {
  return ragged == Ragged::kM ? a.m : ragged == Ragged::kN ? a.n : a.k;
}

}  // namespace

int64_t matmul_grouped_workspace(const Matmul& a, Ragged ragged) {
  const int cap = cap_of(a, ragged);
  return 16 + 16 * (cap == 0 ? a.batch : most_tiles(ragged_size(a, ragged), a.batch, cap));
}

void matmul_grouped(const Matmul& a, Ragged ragged, const int32_t* offsets, void* workspace) {
  if (a.m == 0 || a.n == 0) return;
  const int cap = cap_of(a, ragged);
  const bool few = cap == kMoeDecodeRows;
  auto* const counts = static_cast<int*>(workspace);
  auto* const tiles = reinterpret_cast<MoeTile*>(counts + 4);
  int* const count = counts + (few ? 1 : 0);  // where the kernel of few rows looks for it
  const Rest rest{
      a.out, a.out_row, a.m, a.n, static_cast<int>(size_of(a.dtype)), static_cast<int>(ragged_size(a, ragged)), ragged};
  launch(table_kernel, {dim3(ragged == Ragged::kK ? 1 : kTableBlocks), kThreads, 0}, a.stream, offsets,
         static_cast<int>(a.batch), cap, count, tiles, rest);
  if (a.batch == 0) return;
  if (served_by_sums(a, ragged)) return matmul_grouped_sums(a, tiles);
  if (!served_by_experts(a, ragged)) {
    const auto general = a.dtype == DType::kFloat32 ? matmul_float : matmul_general;
    return general(a, {ragged, tiles, count});
  }
  MoeProduct p{};
  p.tables.counts = counts;
  p.tables.up_tiles = p.tables.down_tiles = tiles;
  p.out = a.out;
  p.experts = static_cast<int>(a.batch);
  p.columns = p.out_width = static_cast<int>(a.n);
  p.k_blocks = static_cast<int>(a.k / 64);
  const auto product = few ? moe_down_decode : moe_down_prefill;
  product(a.x, a.x_row, a.w, a.dtype, a.w_k == 1, a.m, a.k, p, a.stream);
}

}  // namespace quartz::kernels::cuda
