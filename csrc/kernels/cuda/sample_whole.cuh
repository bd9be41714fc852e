// A row of logits in the shared memory of a cluster of blocks, each block a slice of ids in ascending order, so that
// the logits are read once. Truncation is a radix selection: a histogram of 1024 bins over the distance from the
// largest logit; then a list of the bin where the limit lies or, if it is full, the same over the bits of the values in
// that bin, and over ids where equal values are cut. Counts and masses are integers: atomics on them have no order.
#pragma once

#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include "kernels/cuda/sample_streams.cuh"
#include "kernels/sample.h"

namespace quartz::kernels::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 512, kWarps = kThreads / 32, kBins = 1024, kBinBits = 10, kMaxCluster = 16;
constexpr float kMostNoise = 39.0f;  // no Gumbel noise of philox.h is larger
static_assert(kBins == 2 * kThreads);

struct Crossing {
  int bin;  // -1: the limit is not reached
  uint64_t before, weight, total;
};

struct Shared {
  uint32_t low[kBins], high[kBins];  // 64-bit sums in two words
  uint64_t exchange[2][3][kMaxCluster], partial[3][kWarps];
  uint64_t listed[kMaxTopLogprobs], weights[kMaxTopLogprobs], last_kept;
  uint32_t listed_count;
  float start;  // a score that the draw has at least
  Crossing crossing;
};

// Out of line: rare, and the loops would be repeated at every use.
__device__ __noinline__ float value_of(const Sample& a, int64_t row, int64_t id, bool raw) {
  const int64_t at = row * a.stride + id;
  const float x = a.dtype == DType::kFloat32   ? static_cast<const float*>(a.logits)[at]
                  : a.dtype == DType::kFloat16 ? to_float(static_cast<const Float16*>(a.logits)[at])
                                               : to_float(static_cast<const BFloat16*>(a.logits)[at]);
  return raw ? sanitized(x) : RowInputs(a, row).value(x, id);
}

// A row of logits in the shared memory of a cluster. All threads of the cluster call every function together.
class Row {
 public:
  // Alone: one block has the whole row, the others of its cluster have left.
  __device__ Row(const Sample& a, Shared& shared, float* values, int slice, int cached, bool alone)
      : cluster_(cg::this_cluster()),
        a_(a),
        shared_(shared),
        values_(values),
        alone_(alone),
        blocks_(alone ? 1 : static_cast<int>(cluster_.num_blocks())),
        rank_(alone ? 0 : static_cast<int>(cluster_.block_rank())),
        row(blockIdx.x / cluster_.num_blocks()),
        vocabulary_(static_cast<int>(a.vocabulary)),
        begin_(rank_ * slice),
        length_(slice),
        cached_(cached) {
    if (!alone_) cluster_.barrier_arrive();
  }

  // Fills the slice (steps 1 to 4, or step 1 alone) and finds the largest value with its lowest id.
  __device__ void load(bool raw) {
    raw_ = raw;
    Extremes extremes;
    switch (a_.dtype) {
      case DType::kFloat32:
        fill<float>(extremes);
        break;
      case DType::kFloat16:
        fill<Float16>(extremes);
        break;
      default:
        fill<BFloat16>(extremes);
    }
    if (!raw && has_sparse(a_)) {  // entries are recomputed as a whole, so the order of equal ids does not matter
      __syncthreads();
      for (int64_t i = threadIdx.x; i < a_.bias_width + a_.pending_width; i += kThreads) {
        const int64_t id = i < a_.bias_width ? a_.bias_ids[row * a_.bias_width + i]
                                             : a_.pending[row * a_.pending_width + i - a_.bias_width];
        if (id < begin_ || id >= vocabulary_ || id >= begin_ + cached_) continue;
        values_[id - begin_] = value_of(a_, row, id, false);
      }
      __syncthreads();
      extremes = {};
      for_each([&](int id, float x) { extremes.add(x, id); });
    }
    if (!started_ && !alone_) cluster_.barrier_wait();  // the other blocks' memory exists
    started_ = true;
    uint64_t found[3];
    found[0] = extremes.key();
    found[1] = ~uint64_t{order_of(extremes.value)};
    uint64_t of_warp = order_of(extremes.value);
    for (int offset = 16; offset > 0; offset /= 2) {
      of_warp = max(of_warp, static_cast<uint64_t>(__shfl_xor_sync(~0u, of_warp, offset)));
    }
    found[2] = ~of_warp;
    cluster_max(found);
    largest = float_of_order(static_cast<uint32_t>(found[0] >> 32));
    largest_id = ~static_cast<uint32_t>(found[0]);
    if (largest == kMinusInfinity) largest_id = 0;
    least_of_threads_ = float_of_order(static_cast<uint32_t>(~found[1]));
    least_of_warps_ = float_of_order(static_cast<uint32_t>(~found[2]));
  }

  // Calls visit(id, x) for the elements of this thread, in ascending order.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
    for_each_four([&](int id, const float(&x)[kVector]) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) visit(id + j, x[j]);
    });
  }
  template <class Visit>
  __device__ void for_each_four(const Visit& visit) const {
    for (int i = threadIdx.x * kVector; i < length_; i += kThreads * kVector) {
      float x[kVector];
      if (i < cached_) {
        const float4 four = *reinterpret_cast<const float4*>(values_ + i);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      } else {  // a vocabulary that the cluster's memory cannot hold
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const int id = begin_ + i + j;
          x[j] = id < vocabulary_ ? value_of(a_, row, id, raw_) : kMinusInfinity;
        }
      }
      visit(begin_ + i, x);
    }
  }

  // Keeps the first `count` of the tokens that `cut` keeps.
  __device__ Cut first(Cut cut, int64_t count) {
    // A bound below the tokens looked for: as many warps (threads) have a value at least as large.
    float low = -kLargest;
    if (count <= kThreads * blocks_) low = fmaxf(low, least_of_threads_);
    if (count <= kWarps * blocks_) low = fmaxf(low, least_of_warps_);
    return select(
        cut, fmaxf(low, cut.value), [](float) { return uint64_t{1}; }, [&](uint64_t) { return uint64_t(count); });
  }
  // Keeps the tokens before which less than top_p of the mass lies.
  __device__ Cut nucleus(Cut cut, float top_p, float inverse_temperature) {
    const float low = lowest_value(largest, inverse_temperature, kMasslessBelow);
    return select(
        cut, fmaxf(low, cut.value), [&](float x) { return mass_of(scaled(x, largest, inverse_temperature)); },
        [&](uint64_t total) { return mass_limit(top_p, total); });
  }
  __device__ uint64_t mass(Cut cut, float inverse_temperature) {
    uint64_t sum = 0;
    for_each([&](int id, float x) {
      const float z = scaled(x, largest, inverse_temperature);
      if (z >= kMasslessBelow && cut.keeps(x, id)) sum += mass_of(z);
    });
    return cluster_sum(sum);
  }

  // The token with the largest z + noise among those kept.
  __device__ int64_t draw(Cut cut, float inverse_temperature, const TokenNoise& noise) {
    float best = noise.gumbel(largest_id);
    uint32_t best_id = largest_id;
    for_each_four([&](int id, const float(&x)[kVector]) {
      const float top = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
      if (!cut.keeps(top, 0) || scaled(top, largest, inverse_temperature) + kMostNoise < best) return;
      const PhiloxWords words = noise.words(static_cast<uint32_t>(id) / kVector);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float z = scaled(x[j], largest, inverse_temperature);
        if (z + TokenNoise::gumbel_bound(words.word[j]) < best || !cut.keeps(x[j], id + j)) continue;
        const float score = z + noise.gumbel(id + j, words.word[j]);
        if (score > best || (score == best && static_cast<uint32_t>(id + j) < best_id)) {
          best = score;
          best_id = id + j;
        }
      }
    });
    uint64_t found[1] = {uint64_t{order_of(best)} << 32 | (~best_id & 0xffffffffu)};
    cluster_max(found);
    return ~static_cast<uint32_t>(found[0]);
  }

  // The draw of a row without top-k and top-p, straight from the logits; -1 if nothing is left. `sum` becomes the mass
  // of the tokens kept, if it is wanted.
  __device__ int64_t draw_open(const RowRules& rules, const TokenNoise& noise, uint64_t* sum) {
    switch (a_.dtype) {
      case DType::kFloat32:
        return draw_open_as<float>(rules, noise, sum);
      case DType::kFloat16:
        return draw_open_as<Float16>(rules, noise, sum);
      default:
        return draw_open_as<BFloat16>(rules, noise, sum);
    }
  }

  // Writes the tokens kept, at most `count`, in their order, with x - largest - log_sum.
  __device__ void list(Cut cut, int64_t count, float log_sum, int64_t* ids, float* logprobs) {
    if (threadIdx.x == 0) shared_.listed_count = 0;
    sync();
    Shared* leader = cluster_.map_shared_rank(&shared_, 0);
    for_each([&](int id, float x) {
      if (!cut.keeps(x, id)) return;
      leader->listed[atomicAdd(&leader->listed_count, 1u)] = uint64_t{order_of(x)} << 32 | (~static_cast<uint32_t>(id));
    });
    sync();
    if (rank_ != 0) return;
    const int found = static_cast<int>(shared_.listed_count);
    for (int i = threadIdx.x; i < count; i += kThreads) {
      if (i >= found) {
        ids[i] = -1;
        logprobs[i] = kMinusInfinity;
        continue;
      }
      const uint64_t key = shared_.listed[i];
      int place = 0;
      for (int j = 0; j < found; ++j) place += shared_.listed[j] > key;
      ids[place] = ~static_cast<uint32_t>(key);
      logprobs[place] = float_of_order(static_cast<uint32_t>(key >> 32)) - largest - log_sum;
    }
  }

  __device__ bool leads() const { return rank_ == 0 && threadIdx.x == 0; }
  // A block's memory must outlive the accesses of the others.
  __device__ void leave() { sync(); }

 private:
  cg::cluster_group cluster_;
  const Sample& a_;
  Shared& shared_;
  float* values_;
  const bool alone_;
  const int blocks_, rank_;

 public:
  const int64_t row;
  float largest = kMinusInfinity;
  uint32_t largest_id = 0;

 private:
  int vocabulary_, begin_, length_, cached_, parity_ = 0;
  float least_of_threads_ = kMinusInfinity, least_of_warps_ = kMinusInfinity;
  bool raw_ = false, started_ = false;

  struct Extremes {
    float value = kMinusInfinity;
    uint32_t id = 0;
    __device__ void add(float x, int token) {
      if (x > value) {
        value = x;
        id = token;
      }
    }
    __device__ uint64_t key() const { return uint64_t{order_of(value)} << 32 | (~id & 0xffffffffu); }
  };

  __device__ void sync() {
    if (alone_) {
      __syncthreads();
    } else {
      cluster_.sync();
    }
  }

  template <class T>
  __device__ void fill(Extremes& extremes) {
    const T* logits = static_cast<const T*>(a_.logits) + row * a_.stride;
    const bool dense = !raw_ && has_dense(a_);
    RowInputs inputs;
    if (dense) inputs = RowInputs(a_, row);
    const bool aligned = reinterpret_cast<uintptr_t>(logits) % (kVector * sizeof(T)) == 0;
    constexpr int kBatch = 4, kStep = kThreads * kVector;
    for (int base = threadIdx.x * kVector; base < length_; base += kBatch * kStep) {
      Four<T> loaded[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = base + b * kStep, id = begin_ + i;
        if (i >= length_) continue;
        if (aligned && id + kVector <= vocabulary_) {
          loaded[b] = *reinterpret_cast<const Four<T>*>(logits + id);
        } else {
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            loaded[b].value[j] = id + j < vocabulary_ ? logits[id + j] : from_float<T>(kMinusInfinity);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = base + b * kStep;
        if (i >= length_) continue;
        float x[kVector];
#pragma unroll
        for (int j = 0; j < kVector; ++j) x[j] = sanitized(to_float(loaded[b].value[j]));
        if (dense) {
#pragma unroll 1
          for (int j = 0; j < kVector; ++j) {
            if (begin_ + i + j < vocabulary_) x[j] = inputs.dense_value(x[j], begin_ + i + j);
          }
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) extremes.add(x[j], begin_ + i + j);
        if (i < cached_) *reinterpret_cast<float4*>(values_ + i) = make_float4(x[0], x[1], x[2], x[3]);
      }
    }
  }

  template <class T>
  __device__ int64_t draw_open_as(const RowRules& rules, const TokenNoise& noise, uint64_t* sum) {
    const Workspace space(a_);
    const float* maxima = space.maxima + row * space.chunks;
    const T* logits = static_cast<const T*>(a_.logits) + row * a_.stride;
    const bool aligned = is_aligned(logits), dense = has_dense(a_);
    RowInputs inputs;
    if (dense) inputs = RowInputs(a_, row);
    const float inverse = rules.inverse_temperature;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const auto element = [&](const Four<T>& four, int j, int64_t id) {
      const float x = sanitized(to_float(four.value[j]));
      return dense && id < vocabulary_ ? inputs.dense_value(x, id) : x;
    };

    // The largest value and the first chunk that has it; its score: most others need no logarithm to be seen to be
    // lower.
    uint64_t top = 0;
    for (int c = threadIdx.x; c < space.chunks; c += kThreads) {
      top = max(top, uint64_t{order_of(maxima[c])} << 32 | (~static_cast<uint32_t>(c)));
    }
    top = block_max(top);
    largest = float_of_order(static_cast<uint32_t>(top >> 32));
    uint64_t best_key = 0, mass = 0;
    if (largest > kMinusInfinity) {
      if (warp == 0) {
        const int64_t chunk = ~static_cast<uint32_t>(top);
        Four<T> loaded[kPerLane / kVector];
        load_chunk(logits, vocabulary_, aligned, chunk, lane, loaded);
        uint32_t lowest = 0xffffffffu;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          const int64_t id = id_in_chunk(chunk, lane, j);
          if (element(loaded[j / kVector], j % kVector, id) == largest) lowest = min(lowest, static_cast<uint32_t>(id));
        }
        lowest = __reduce_min_sync(~0u, lowest);
        if (lane == 0) shared_.start = noise.gumbel(lowest);
      }
      __syncthreads();
      float best = shared_.start;  // of the warp
      for (int chunk = rank_ * kWarps + warp; chunk < space.chunks; chunk += blocks_ * kWarps) {
        const float z_of_chunk = scaled(maxima[chunk], largest, inverse);
        if (maxima[chunk] == kMinusInfinity || !(z_of_chunk >= rules.lowest_z)) continue;
        if (sum == nullptr && z_of_chunk + kMostNoise < best) continue;
        Four<T> loaded[kPerLane / kVector];
        load_chunk(logits, vocabulary_, aligned, chunk, lane, loaded);
        float own = best;
#pragma unroll
        for (int group = 0; group < kPerLane / kVector; ++group) {
          const int64_t id = id_in_chunk(chunk, lane, group * kVector);
          const PhiloxWords words = noise.words(static_cast<uint32_t>(id / kVector));
#pragma unroll
          for (int j = 0; j < kVector; ++j) {
            const float x = element(loaded[group], j, id + j), z = scaled(x, largest, inverse);
            if (x == kMinusInfinity || !(z >= rules.lowest_z)) continue;
            if (sum != nullptr && z >= kMasslessBelow) mass += mass_of(z);
            if (z + TokenNoise::gumbel_bound(words.word[j]) < own) continue;
            const float score = z + noise.gumbel(static_cast<uint32_t>(id + j), words.word[j]);
            own = fmaxf(own, score);
            best_key = max(best_key, uint64_t{order_of(score)} << 32 | (~static_cast<uint32_t>(id + j)));
          }
        }
        best = float_of_order(__reduce_max_sync(~0u, order_of(own)));
      }
    }
    if (!started_) cluster_.barrier_wait();
    started_ = true;
    uint64_t found[1] = {best_key};
    cluster_max(found);
    if (sum != nullptr) *sum = cluster_sum(mass);
    return found[0] == 0 ? -1 : int64_t{~static_cast<uint32_t>(found[0])};
  }

  __device__ uint64_t block_max(uint64_t v) {
    for (int offset = 16; offset > 0; offset /= 2) v = max(v, static_cast<uint64_t>(__shfl_xor_sync(~0u, v, offset)));
    if (threadIdx.x % 32 == 0) shared_.partial[0][threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) v = max(v, shared_.partial[0][w]);
    __syncthreads();
    return v;
  }

  template <bool kSum, int N>
  __device__ void cluster_reduce(uint64_t (&value)[N]) {
    const auto combine = [](uint64_t a, uint64_t b) { return kSum ? a + b : max(a, b); };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      for (int offset = 16; offset > 0; offset /= 2) {
        value[n] = combine(value[n], __shfl_xor_sync(~0u, value[n], offset));
      }
      if (lane == 0) shared_.partial[n][warp] = value[n];
    }
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        uint64_t v = shared_.partial[n][lane % kWarps];
        for (int offset = kWarps / 2; offset > 0; offset /= 2) v = combine(v, __shfl_xor_sync(~0u, v, offset));
        if (lane < blocks_) cluster_.map_shared_rank(&shared_, lane)->exchange[parity_][n][rank_] = v;
      }
    }
    sync();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      value[n] = shared_.exchange[parity_][n][0];
      for (int block = 1; block < blocks_; ++block) value[n] = combine(value[n], shared_.exchange[parity_][n][block]);
    }
    parity_ ^= 1;  // the next but one reduction overwrites: the one between separates it from these reads
  }
  template <int N>
  __device__ void cluster_max(uint64_t (&value)[N]) {
    cluster_reduce<false>(value);
  }
  __device__ uint64_t cluster_sum(uint64_t value) {
    uint64_t values[1] = {value};
    cluster_reduce<true>(values);
    return values[0];
  }

  __device__ void clear_bins() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) shared_.low[i] = shared_.high[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) {
      shared_.crossing = {-1, 0, 0, 0};
      shared_.listed_count = 0;
    }
  }
  __device__ void add_to_bin(uint32_t bin, uint64_t weight) {
    const auto low = static_cast<uint32_t>(weight);
    const uint32_t old = atomicAdd(&shared_.low[bin], low);
    const uint32_t high = static_cast<uint32_t>(weight >> 32) + (old + low < old);
    if (high != 0) atomicAdd(&shared_.high[bin], high);
  }
  // The bin in which the sum over bins, starting with `before`, reaches limit(total).
  template <class Limit>
  __device__ Crossing crossing(uint64_t before, const Limit& limit) {
    sync();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, bin = 2 * threadIdx.x;
    uint64_t own[2] = {0, 0};
    for (int block = 0; block < blocks_; ++block) {
      const Shared* other = cluster_.map_shared_rank(&shared_, block);
      const uint2 low = *reinterpret_cast<const uint2*>(&other->low[bin]);
      const uint2 high = *reinterpret_cast<const uint2*>(&other->high[bin]);
      own[0] += uint64_t{high.x} << 32 | low.x;
      own[1] += uint64_t{high.y} << 32 | low.y;
    }
    uint64_t sum = own[0] + own[1];
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint64_t left = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += left;
    }
    if (lane == 31) shared_.partial[0][warp] = sum;
    __syncthreads();
    uint64_t total = 0, start = before + sum - own[0] - own[1];
    for (int w = 0; w < kWarps; ++w) {
      total += shared_.partial[0][w];
      if (w < warp) start += shared_.partial[0][w];
    }
    const uint64_t wanted = limit(total);
    for (int half = 0; half < 2; ++half) {
      if (start < wanted && wanted <= start + own[half]) shared_.crossing = {bin + half, start, own[half], total};
      start += own[half];
    }
    sync();
    return shared_.crossing;
  }

  // Writes the token of the list at which the sum of weights, starting with `before`, reaches `wanted`.
  template <class Weight>
  __device__ void last_of_list(int members, uint64_t before, uint64_t wanted, const Weight& weight) {
    static_assert(kMaxTopLogprobs <= kThreads);
    const int i = threadIdx.x;
    uint64_t key = 0, own = 0;
    if (i < members) {
      key = shared_.listed[i];
      own = shared_.weights[i] = weight(float_of_order(static_cast<uint32_t>(key >> 32)));
    }
    __syncthreads();
    if (i >= members) return;
    for (int j = 0; j < members; ++j) before += shared_.listed[j] > key ? shared_.weights[j] : 0;
    if (before < wanted && wanted <= before + own) shared_.last_kept = key;
  }

  // The cut after the first token, in order, at which the sum of weights reaches limit(sum of all). Tokens below `low`
  // weigh nothing, or the limit is reached before them.
  template <class Weight, class Limit>
  __device__ Cut select(Cut cut, float low, const Weight& weight, const Limit& limit) {
    const float range = largest - low;
    const float scale = range > 0.0f && range <= kLargest ? fminf(kBins / range, 1e30f) : 0.0f;
    const auto bin_of = [&](float x) { return min(static_cast<int>((largest - x) * scale), kBins - 1); };
    uint64_t wanted = 0;
    clear_bins();
    for_each([&](int id, float x) {
      if (x >= low && cut.keeps(x, id)) add_to_bin(bin_of(x), weight(x));
    });
    Crossing at = crossing(0, [&](uint64_t total) { return wanted = limit(total); });
    if (at.bin < 0) return cut;
    // As a rule the bin has few tokens: the first block lists them and finds the last one that stays.
    Shared* leader = cluster_.map_shared_rank(&shared_, 0);
    for_each([&](int id, float x) {
      if (x < low || bin_of(x) != at.bin || !cut.keeps(x, id)) return;
      const uint32_t place = atomicAdd(&leader->listed_count, 1u);
      if (place < kMaxTopLogprobs) leader->listed[place] = uint64_t{order_of(x)} << 32 | (~static_cast<uint32_t>(id));
    });
    sync();
    const uint32_t members = leader->listed_count;
    if (members <= kMaxTopLogprobs) {
      if (rank_ == 0) last_of_list(static_cast<int>(members), at.before, wanted, weight);
      sync();
      const uint64_t key = leader->last_kept;
      return {float_of_order(static_cast<uint32_t>(key >> 32)), ~static_cast<uint32_t>(key)};
    }

    const auto same = [&](uint64_t) { return wanted; };

    uint64_t ends[2] = {0, 0};  // the largest and the inverted smallest value in the bin
    for_each([&](int id, float x) {
      if (x < low || !cut.keeps(x, id) || bin_of(x) != at.bin) return;
      ends[0] = max(ends[0], uint64_t{order_of(x)});
      ends[1] = max(ends[1], uint64_t{~order_of(x)});
    });
    cluster_max(ends);
    uint32_t upper = static_cast<uint32_t>(ends[0]), lower = ~static_cast<uint32_t>(ends[1]);
    while (upper > lower) {
      const int shift = max(0, 32 - __clz(upper - lower) - kBinBits);
      clear_bins();
      for_each([&](int id, float x) {
        const uint32_t order = order_of(x);
        if (order >= lower && order <= upper && cut.keeps(x, id)) add_to_bin((upper - order) >> shift, weight(x));
      });
      at = crossing(at.before, same);
      upper -= static_cast<uint32_t>(at.bin) << shift;
      const uint32_t width = (1u << shift) - 1;
      if (upper - lower > width) lower = upper - width;
    }

    const float value = float_of_order(upper);
    const uint64_t each = weight(value), needed = (wanted - at.before + each - 1) / each;
    if (needed * each == at.weight) return {value, value == cut.value ? cut.id : 0xffffffffu};
    uint32_t first_id = 0, last_id = vocabulary_ - 1;
    uint64_t before = 0;
    while (last_id > first_id) {
      const int shift = max(0, 32 - __clz(last_id - first_id) - kBinBits);
      clear_bins();
      for_each([&](int id, float x) {
        const auto token = static_cast<uint32_t>(id);
        if (x == value && token >= first_id && token <= last_id && cut.keeps(x, id)) {
          add_to_bin((token - first_id) >> shift, 1);
        }
      });
      at = crossing(before, [&](uint64_t) { return needed; });
      before = at.before;
      first_id += static_cast<uint32_t>(at.bin) << shift;
      last_id = min(last_id, first_id + (1u << shift) - 1);
    }
    return {value, first_id};
  }
};

}  // namespace
}  // namespace quartz::kernels::cuda
