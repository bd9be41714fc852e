// A warpgroup of 64 query rows: scores, softmax, values, chunks, results. Row of a warpgroup = token * group + head.
#pragma once

#include "kernels/cuda/attention_numerics.cuh"
#include "kernels/cuda/attention_tiles.cuh"

namespace quartz::kernels::cuda::attention_kernels {

// Which query the two rows of a lane's fragment belong to, in one register: token within the item and head within the
// block of heads, a byte each. Rows that belong to none have the token 255, which is no item's.
struct LaneRows {
  uint32_t packed = 0;
  QUARTZ_DEVICE void set(int r, int token, int head) {
    packed |= static_cast<uint32_t>(token) << (16 * r) | static_cast<uint32_t>(head) << (16 * r + 8);
  }
  QUARTZ_DEVICE int token(int r) const { return packed >> (16 * r) & 255; }
  QUARTZ_DEVICE int head(int r) const { return packed >> (16 * r + 8) & 255; }
};

template <class T, int D, int KIND>
struct Consumer {
  static constexpr bool kSplitKind = KIND == kOneRow || KIND == kSplit || KIND == kSplitFull;
  static constexpr bool kFull = KIND == kSplitFull || KIND == kWideFull;
  static constexpr int kRows = KIND == kOneRow ? 1 : 2;  // of a lane that are computed
  static constexpr bool kOverlap = D < 256;              // values of a tile beside the scores of the next
  using L = Layout<D, kSplitKind>;

  const Params& p;
  uint8_t* shared_memory;
  uint32_t shared;
  int warpgroup, warp, lane, thread;  // warp, thread: within the warpgroup
  LaneRows rows;
  float4* fold;  // this lane's share of the folded chunks, 32 apart
  float s[64], o[D / 2];
  uint32_t probabilities[32];
  RowState state[2], total[2];
  float factor[2];

  QUARTZ_DEVICE int first_row() const { return warp * 16 + lane / 4; }

  QUARTZ_DEVICE void place(int group) {
    const int tokens = 64 / group;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row() + 8 * r;
      rows.set(r, row < tokens * group ? warpgroup * tokens + row / group : 255, row % group);
    }
    if constexpr (L::kFoldShared) {
      fold = reinterpret_cast<float4*>(shared_memory + L::kFold + (warpgroup * 4 + warp) * 16 * D * 4) + lane;
    } else {
      fold = reinterpret_cast<float4*>(p.scratch) +
             ((static_cast<int64_t>(blockIdx.x) * L::kGroups + warpgroup) * 4 + warp) * 4 * D + lane;
    }
  }

  // Keys [low, high) of the two rows; those outside get minus infinity.
  QUARTZ_DEVICE void limit(int key0, const int (&low)[2], const int (&high)[2]) {
    if (key0 + kTile > high[0]) {  // the lower row's end comes first
      const int first = 2 * (lane & 3);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int end = high[r] - key0 - first;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
          if (8 * j >= end) s[4 * j + 2 * r] = minus_infinity();
          if (8 * j + 1 >= end) s[4 * j + 2 * r + 1] = minus_infinity();
        }
      }
    }
    if constexpr (kFull) {
      if (key0 < low[1]) {
        const int first = 2 * (lane & 3);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int begin = low[r] - key0 - first;
#pragma unroll
          for (int j = 0; j < 16; ++j) {
            if (8 * j < begin) s[4 * j + 2 * r] = minus_infinity();
            if (8 * j + 1 < begin) s[4 * j + 2 * r + 1] = minus_infinity();
          }
        }
      }
    }
  }

  // A power of two: its product with c is exact, so that p is 1 where all keys of a row have it.
  static constexpr float kLowest = -0x1p100f;
  QUARTZ_DEVICE float masked(float score, int64_t at) const {
    float added;
    switch (p.mask_kind) {
      case MaskKind::kVisible:
        return static_cast<const uint8_t*>(p.mask)[at] != 0 ? score : minus_infinity();
      case MaskKind::kFloat32:
        added = static_cast<const float*>(p.mask)[at];
        break;
      case MaskKind::kFloat16:
        added = to_float(static_cast<const Float16*>(p.mask)[at]);
        break;
      default:
        added = to_float(static_cast<const BFloat16*>(p.mask)[at]);
    }
    if (added == 0.0f) return score;
    if (added == minus_infinity()) return added;
    const float sum = __fmaf_rn(added, p.c_inverse, score);
    // "The smallest number" as a mask: such keys count equally, and only if alone.
    return sum < kLowest ? kLowest : sum;
  }

  // Soft cap and mask.
  QUARTZ_DEVICE void modify(const AttentionItem& item, int key0, const int (&high)[2]) {
    if (p.cap > 0.0f) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = soft_capped(s[i], p.cap_c1, p.cap);
    }
    if (p.mask != nullptr) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t base = item.sequence * p.mask_batch + (item.head * p.group + rows.head(r)) * p.mask_head +
                             (item.token + rows.token(r)) * p.mask_query;
        if (rows.token(r) >= item.tokens) continue;
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = key0 + 8 * j + 2 * (lane & 3) + e;
            if (key < high[r]) s[4 * j + 2 * r + e] = masked(s[4 * j + 2 * r + e], base + key * p.mask_key);
          }
        }
      }
    }
  }

  // Value rows that no row of the item may see count as zeros: what lies in memory there may be NaN.
  QUARTZ_DEVICE void clear_values(const AttentionItem& item, int tile, int stage) {
    const int key0 = tile * kTile;
    const int low = kFull ? first_key(item, p) - key0 : 0, high = item.keys - key0;
    if (high >= kTile && low <= 0) return;
    const uint32_t target = shared + L::kValues + stage * L::kStageBytes;
    for (int i = thread; i < kTile * L::kColumns * 8; i += 128) {
      const int row = i / (L::kColumns * 8), column = i / 8 % L::kColumns;
      if (row >= low && row < high) continue;
      asm volatile(
          "st.shared.v4.b32 [%0], {%1,%1,%1,%1};" ::"r"(target + column * L::kBoxBytes + row * 128 + i % 8 * 16), "r"(0)
          : "memory");
    }
    fence_shared_writes();
    named_barrier(3 + warpgroup, 128);
  }

  QUARTZ_DEVICE void softmax() {
    factor[0] = softmax_tile<0>(s, state[0], p.c);
    if constexpr (kRows == 2) factor[1] = softmax_tile<1>(s, state[1], p.c);
  }

  QUARTZ_DEVICE void round_probabilities() {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (kRows == 2 || i % 2 == 0) probabilities[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
  }

  // A factor of 1 changes nothing.
  QUARTZ_DEVICE void rescale() {
    if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      o[4 * j] = __fmul_rn(o[4 * j], factor[0]);
      o[4 * j + 1] = __fmul_rn(o[4 * j + 1], factor[0]);
      o[4 * j + 2] = __fmul_rn(o[4 * j + 2], factor[1]);
      o[4 * j + 3] = __fmul_rn(o[4 * j + 3], factor[1]);
    }
  }

  // Adds a finished chunk to what is folded so far; `keep`: leaves the sum in o instead of beside it.
  QUARTZ_DEVICE void fold_chunk(const RowState (&chunk)[2], bool first, bool keep) {
    if (first) {
      total[0] = chunk[0];
      total[1] = chunk[1];
      if (keep) return;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) fold[j * 32] = make_float4(o[4 * j], o[4 * j + 1], o[4 * j + 2], o[4 * j + 3]);
      return;
    }
    const FoldFactors low = fold_row(total[0], chunk[0].m, chunk[0].l, p.c);
    const FoldFactors high = fold_row(total[1], chunk[1].m, chunk[1].l, p.c);
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      float4 x = fold[j * 32];
      x.x = fold_value(x.x, o[4 * j], low);
      x.y = fold_value(x.y, o[4 * j + 1], low);
      x.z = fold_value(x.z, o[4 * j + 2], high);
      x.w = fold_value(x.w, o[4 * j + 3], high);
      if (keep) {
        o[4 * j] = x.x;
        o[4 * j + 1] = x.y;
        o[4 * j + 2] = x.z;
        o[4 * j + 3] = x.w;
      } else {
        fold[j * 32] = x;
      }
    }
  }

  // Writes o and (m, l) of the item's rows as a partial result.
  QUARTZ_DEVICE void write_partial(const AttentionItem& item, int slot, const RowState (&chunk)[2]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (rows.token(r) >= item.tokens) continue;
      const int64_t at = static_cast<int64_t>(slot) * p.slot_rows + first_row() + 8 * r;
      float* to = p.partial + at * D + 2 * (lane & 3);
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
      }
      if ((lane & 3) == 0) p.partial_ml[at] = make_float2(chunk[r].m, chunk[r].l);
    }
  }

  // Divides, rounds and writes the item's rows. The four lanes of a row exchange words so that each writes 16 bytes.
  QUARTZ_DEVICE void write_result(const AttentionItem& item) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const bool valid = rows.token(r) < item.tokens;
      const int head = item.head * p.group + rows.head(r), token = item.token + rows.token(r);
      const int64_t batch = p.batched ? item.sequence : 0;
      float scale = 1.0f;
      if (p.sinks != nullptr && valid) {
        scale = fold_row(total[r], p.sinks[head] * p.c_inverse, 1.0f, p.c).before;
      }
      const float inverse = inverse_sum(total[r].l);
      if (valid && p.lse != nullptr && (lane & 3) == 0) {
        p.lse[batch * p.lse_batch + token * p.lse_token + head * p.lse_head] = natural_logsumexp(total[r], p.c);
      }
      T* to = static_cast<T*>(p.out) + batch * p.out_batch + token * p.out_token + head * p.out_head;
      const int me = lane & 3;
#pragma unroll
      for (int b = 0; b < D / 32; ++b) {
        uint32_t word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int j = 4 * (4 * b + i) + 2 * r;
          word[i] = pack<T>(result(__fmul_rn(o[j], scale), inverse), result(__fmul_rn(o[j + 1], scale), inverse));
        }
        // Transposes the 4 x 4 words of four lanes: lane i gets block 4 b + i.
        const bool odd = me & 1, upper = me & 2;
        uint32_t a = __shfl_xor_sync(~0u, odd ? word[0] : word[1], 1),
                 c = __shfl_xor_sync(~0u, odd ? word[2] : word[3], 1);
        const uint32_t x0 = odd ? a : word[0],
                       x1 = odd ? word[1] : a;  // of block 4 b + odd: lanes (even, odd) of my pair
        const uint32_t y0 = odd ? c : word[2], y1 = odd ? word[3] : c;  // of block 4 b + 2 + odd
        const uint32_t z0 = __shfl_xor_sync(~0u, upper ? x0 : y0, 2), z1 = __shfl_xor_sync(~0u, upper ? x1 : y1, 2);
        const uint4 all = upper ? make_uint4(z0, z1, y0, y1) : make_uint4(x0, x1, z0, z1);
        const int column = 8 * (4 * b + me);
        if (valid && column < p.value_size) *reinterpret_cast<uint4*>(to + column) = all;
      }
    }
  }

  QUARTZ_DEVICE void run(uint32_t key_barriers, uint32_t value_barriers, uint32_t query_barriers,
                         const AttentionItem* items) {
    Buffers<L::kStages> keys(key_barriers, 0), value_ring(value_barriers, 0);
    Buffers<L::kQueryBuffers> queries(query_barriers, 0);
    int item_stage = 0;
    place(p.group);
#pragma unroll
    for (int i = 0; i < 32; ++i) probabilities[i] = 0;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
    factor[1] = 1.0f;
    // The two warpgroups take turns with their scores, so that one's softmax runs beside the other's products. Without
    // the overlap within a warpgroup that always pays.
    const bool alternate = !kSplitKind && (!kOverlap || p.alternate);
    if (alternate && warpgroup == 1) arrive_named_barrier(1, 256);
    const uint32_t key0 = row_descriptor(shared + L::kKeys), value0 = value_descriptor(shared + L::kValues);
    constexpr uint32_t kStep = L::kStageBytes >> 4;
    const auto release = [&](auto& ring) {
      if (lane == 0) barrier_arrive(ring.empty_barrier());
      ring.next();
    };
    for (;;) {
      queries.wait_full();
      const AttentionItem& item = items[item_stage];
      item_stage = (item_stage + 1) % L::kItemBuffers;
      if (__shfl_sync(~0u, item.sequence, 0) < 0) break;
      // The same for all lanes, and known to be: they steer the products.
      const int tile_begin = __shfl_sync(~0u, item.tile_begin, 0), tile_end = __shfl_sync(~0u, item.tile_end, 0);
      int low[2], high[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = item.position + rows.token(r);
        high[r] = p.causal ? min(position + 1, item.keys) : item.keys;
        low[r] = kFull && p.window > 0 ? max(0, position + 1 - p.window) : 0;
      }
      const int flags = __shfl_sync(~0u, static_cast<int>(item.flags), 0);
      const bool begins = flags & AttentionItem::kBegins, ends = flags & AttentionItem::kEnds;
      int next_chunk = AttentionChunks::of(tile_begin) + 1, folded = 0, slot = item.slot, accumulate = 0;
      int boundary = AttentionChunks::begin(next_chunk);
      const uint32_t query = row_descriptor(shared + queries.stage * L::kQueryBytes + warpgroup * (64 * D * 2));
      state[0].reset();
      state[1].reset();
      total[0].reset();
      total[1].reset();

      const auto make_probabilities = [&](int tile) {
        if constexpr (kFull) modify(item, tile * kTile, high);
        limit(tile * kTile, low, high);
        softmax();
      };
      // The tiles before `tile` make a whole chunk, whose state is `chunk`.
      const auto finish_chunk = [&](RowState(&chunk)[2]) {
        chunk[0].l = sum_of_lanes(chunk[0].l);
        chunk[1].l = sum_of_lanes(chunk[1].l);
        if (begins) {
          fold_chunk(chunk, folded++ == 0, false);
        } else if constexpr (kSplitKind) {
          write_partial(item, slot++, chunk);
        }
        boundary = AttentionChunks::begin(++next_chunk);
        accumulate = 0;
      };
      const auto values_of = [&](int tile, bool clear) {
        value_ring.wait_full();
        if (clear) clear_values(item, tile, value_ring.stage);
        products_fence();
        values<T, D>(o, probabilities, value0 + value_ring.stage * kStep, accumulate);
        products_commit();
      };

      if constexpr (kOverlap) {
        keys.wait_full();
        products_fence();
        scores<T, D>(s, query, key0 + keys.stage * kStep);
        products_commit();
        products_wait<0>();
        pin(s);
        release(keys);
        make_probabilities(tile_begin);
        round_probabilities();
        for (int tile = tile_begin + 1; tile < tile_end; ++tile) {
          keys.wait_full();
          if (alternate) named_barrier(1 + warpgroup, 256);
          products_fence();
          scores<T, D>(s, query, key0 + keys.stage * kStep);
          products_commit();
          values_of(tile - 1, kFull && tile - 1 == tile_begin);
          if (alternate) arrive_named_barrier(2 - warpgroup, 256);
          products_wait<1>();
          pin(s);
          release(keys);
          const bool starts = tile == boundary;
          RowState chunk[2] = {state[0], state[1]};
          if (starts) {
            state[0].reset();
            state[1].reset();
          }
          make_probabilities(tile);
          products_wait<0>();
          pin(o);
          release(value_ring);
          round_probabilities();
          if (starts) {
            finish_chunk(chunk);
          } else {
            accumulate = 1;
            rescale();
          }
        }
        release(queries);
        values_of(tile_end - 1, true);
        products_wait<0>();
        pin(o);
        release(value_ring);
      } else {
        for (int tile = tile_begin; tile < tile_end; ++tile) {
          keys.wait_full();
          if (alternate) named_barrier(1 + warpgroup, 256);
          products_fence();
          scores<T, D>(s, query, key0 + keys.stage * kStep);
          products_commit();
          products_wait<0>();
          pin(s);
          if (alternate) arrive_named_barrier(2 - warpgroup, 256);
          release(keys);
          if (tile == tile_end - 1) release(queries);
          if (tile == boundary) {
            finish_chunk(state);
            state[0].reset();
            state[1].reset();
          }
          make_probabilities(tile);
          if (accumulate) rescale();
          round_probabilities();
          values_of(tile, tile == tile_end - 1 || (kFull && tile == tile_begin));
          products_wait<0>();
          pin(o);
          release(value_ring);
          accumulate = 1;
        }
      }

      state[0].l = sum_of_lanes(state[0].l);
      state[1].l = sum_of_lanes(state[1].l);
      fold_chunk(state, folded == 0, true);
      if (kSplitKind && !(begins && ends)) {
        write_partial(item, slot, total);
      } else {
        write_result(item);
      }
    }
    if (alternate && warpgroup == 0) named_barrier(1, 256);  // takes the last arrival of the other warpgroup
  }
};

}  // namespace quartz::kernels::cuda::attention_kernels
