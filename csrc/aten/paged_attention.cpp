// quartz::paged_attention and quartz::write_kv: attention over a cache of blocks, with ragged query lengths.
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include "aten/attention_call.h"
#include "aten/attention_gpu.h"
#include "aten/kernel_support.h"
#include "aten/operators.h"
#include "aten/parallel.h"
#include "kernels/write_kv.h"

namespace quartz {
namespace {

void check_cache(const char* op, const char* name, const at::Tensor& cache, const at::Tensor& like,
                 const char* like_name) {
  QUARTZ_CHECK_ARGUMENT(cache.dim() == 4, op, name, "have the shape (blocks, block size, heads, size)", cache.sizes());
  QUARTZ_CHECK_ARGUMENT(cache.scalar_type() == like.scalar_type(), op, name,
                        std::string("have the dtype of ") + like_name, cache.scalar_type());
  QUARTZ_CHECK_ARGUMENT(cache.stride(3) == 1 || cache.size(3) == 1, op, name, "have a contiguous last dimension",
                        "stride ", cache.stride(3));
}

void check_indices(const char* op, const char* name, const at::Tensor& tensor, int64_t dims) {
  QUARTZ_CHECK_ARGUMENT(tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong, op, name,
                        "be int32 or int64", tensor.scalar_type());
  QUARTZ_CHECK_ARGUMENT(tensor.dim() == dims, op, name, "have " + std::to_string(dims) + " dimension(s)",
                        tensor.sizes());
}

kernels::Indices indices_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type() == at::kLong};
}

// On the host the contents are at hand: every length and every block that will be read.
void check_sequences(const char* op, const kernels::Attention& a, int64_t rows, int64_t blocks, int64_t table_width) {
  int64_t begin = a.query_starts[0];
  QUARTZ_CHECK_ARGUMENT(begin == 0, op, "query_starts", "begin with 0", begin);
  for (int64_t s = 0; s < a.batch; ++s) {
    const int64_t end = a.query_starts[s + 1], queries = end - begin, keys = a.key_counts[s];
    QUARTZ_CHECK_ARGUMENT(queries >= 0 && end <= rows, op, "query_starts",
                          "ascend from 0 to at most the rows of query, " + std::to_string(rows), end, " after ", begin);
    QUARTZ_CHECK_ARGUMENT(keys >= 0 && keys <= table_width * a.block_size, op, "key_counts",
                          "fit into the block table, " + std::to_string(table_width * a.block_size) + " keys", keys,
                          " for sequence ", s);
    begin = end;
    if (queries == 0 || keys == 0) continue;
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, keys - queries - a.window + 1) : 0;
    for (int64_t i = first / a.block_size; i * a.block_size < keys; ++i) {
      const int64_t block = a.block_table[s * a.block_table_stride + i];
      QUARTZ_CHECK_ARGUMENT(block >= 0 && block < blocks, op, "block_tables",
                            "name blocks below " + std::to_string(blocks), block, " for sequence ", s);
    }
  }
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache,
                           const std::optional<at::Tensor>& value_cache, const at::Tensor& block_tables,
                           const at::Tensor& query_starts, const at::Tensor& key_counts, std::optional<double> scale,
                           bool causal, std::optional<int64_t> window, std::optional<double> soft_cap,
                           const std::optional<at::Tensor>& sinks, std::optional<int64_t> value_size,
                           const std::optional<at::Tensor>& plan, int64_t most_queries) {
  const char* op = "quartz::paged_attention";
  QUARTZ_CHECK_ARGUMENT(query.dim() == 3, op, "query", "have the shape (tokens, heads, size)", query.sizes());
  QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(query), op, "query", "be float32, float16 or bfloat16", query.scalar_type());
  check_cache(op, "key_cache", key_cache, query, "query");
  QUARTZ_CHECK_ARGUMENT(key_cache.size(3) == query.size(2), op, "key_cache", "have the head size of query",
                        key_cache.size(3), " and ", query.size(2));
  const int64_t heads = query.size(1), kv_heads = key_cache.size(2);
  QUARTZ_CHECK_ARGUMENT(kv_heads > 0 && heads % kv_heads == 0, op, "query", "have a multiple of the heads of key_cache",
                        heads, " and ", kv_heads);
  at::Tensor values;
  if (value_cache && value_cache->defined()) {
    QUARTZ_CHECK_ARGUMENT(!value_size, op, "value_size", "be None where value_cache is given", *value_size);
    values = *value_cache;
    check_cache(op, "value_cache", values, query, "query");
    QUARTZ_CHECK_ARGUMENT(values.sizes().slice(0, 3) == key_cache.sizes().slice(0, 3), op, "value_cache",
                          "have the blocks, block size and heads of key_cache", values.sizes(), " and ",
                          key_cache.sizes());
  } else {
    const int64_t width = value_size.value_or(key_cache.size(3));
    QUARTZ_CHECK_ARGUMENT(width >= 1 && width <= key_cache.size(3), op, "value_size",
                          "be between 1 and the head size " + std::to_string(key_cache.size(3)), width);
    values = key_cache.narrow(3, 0, width);
  }
  check_indices(op, "block_tables", block_tables, 2);
  check_indices(op, "query_starts", query_starts, 1);
  check_indices(op, "key_counts", key_counts, 1);
  const int64_t sequences = key_counts.size(0);
  QUARTZ_CHECK_ARGUMENT(block_tables.size(0) == sequences, op, "block_tables", "have one row for each sequence",
                        block_tables.sizes(), " for ", sequences, " sequences");
  QUARTZ_CHECK_ARGUMENT(query_starts.size(0) == sequences + 1, op, "query_starts",
                        "have one element more than there are sequences", query_starts.size(0), " for ", sequences,
                        " sequences");
  check_attention_options(op, window, soft_cap, sinks, heads);
  const auto sink_logits = sinks_of(sinks);
  check_same_device(op, {{"query", query},
                         {"key_cache", key_cache},
                         {"value_cache", values},
                         {"block_tables", block_tables},
                         {"query_starts", query_starts},
                         {"key_counts", key_counts},
                         {"sinks", sink_logits}});

  const c10::DeviceGuard guard(query.device());
  const auto q = with_contiguous_rows(query);
  const auto tables = with_contiguous_rows(block_tables), starts = query_starts.contiguous(),
             counts = key_counts.contiguous();
  auto out =
      at::empty({query.size(0), heads, values.size(3)}, query.options().memory_format(at::MemoryFormat::Contiguous));
  kernels::Attention a{};
  a.dtype = kernel_dtype(query);
  a.batch = sequences;
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.queries = query.size(0);
  a.keys = block_tables.size(1) * key_cache.size(1);
  a.head_size = query.size(2);
  a.value_size = values.size(3);
  a.q = q.const_data_ptr();
  a.k = key_cache.const_data_ptr();
  a.v = values.const_data_ptr();
  a.out = out.mutable_data_ptr();
  a.q_strides = {0, q.stride(1), q.stride(0)};
  a.k_strides = {key_cache.stride(0), key_cache.stride(2), key_cache.stride(1)};
  a.v_strides = {values.stride(0), values.stride(2), values.stride(1)};
  a.out_strides = {0, out.stride(1), out.stride(0)};
  a.query_starts = indices_of(starts);
  a.key_counts = indices_of(counts);
  a.block_table = indices_of(tables);
  a.block_table_stride = tables.stride(0);
  a.block_size = key_cache.size(1);
  a.scale = static_cast<float>(attention_scale(scale, query.size(2)));
  a.soft_cap = static_cast<float>(soft_cap.value_or(0));
  a.causal = causal;
  a.window = window.value_or(0);
  if (sink_logits.defined()) a.sinks = sink_logits.const_data_ptr<float>();
  if (!on_gpu(query)) {
    check_sequences(op, a, query.size(0), key_cache.size(0), block_tables.size(1));
    const int64_t used = a.query_starts[sequences];
    if (used < query.size(0)) out.narrow(0, used, query.size(0) - used).zero_();  // rows of no sequence
  }
  run_attention(op, a, query, {key_cache.size(0), plan.value_or(at::Tensor()), most_queries});
  return out;
}

// How the GPU's kernel divides the work of paged_attention calls: from lengths alone, so that all layers can share it.
at::Tensor attention_plan(const at::Tensor& query_starts, const at::Tensor& key_counts, int64_t rows, int64_t most_keys,
                          int64_t heads, int64_t kv_heads, [[maybe_unused]] bool causal,
                          [[maybe_unused]] std::optional<int64_t> window, int64_t block_size,
                          [[maybe_unused]] int64_t most_queries) {
  const char* op = "quartz::attention_plan";
  check_indices(op, "query_starts", query_starts, 1);
  check_indices(op, "key_counts", key_counts, 1);
  check_same_device(op, {{"query_starts", query_starts}, {"key_counts", key_counts}});
  const int64_t sequences = key_counts.size(0);
  QUARTZ_CHECK_ARGUMENT(query_starts.size(0) == sequences + 1, op, "query_starts",
                        "have one element more than there are sequences", query_starts.size(0), " for ", sequences,
                        " sequences");
  QUARTZ_CHECK_ARGUMENT(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, op, "heads", "be a multiple of kv_heads",
                        heads, " and ", kv_heads);
  QUARTZ_CHECK_ARGUMENT(rows >= 0 && most_keys >= 0 && block_size > 0, op, "rows",
                        "not be negative, like most_keys, and block_size be positive", rows, ", ", most_keys, " and ",
                        block_size);
#if QUARTZ_WITH_CUDA
  if (on_gpu(query_starts) && rows > 0) {
    const c10::DeviceGuard guard(query_starts.device());
    const auto starts = query_starts.contiguous(), counts = key_counts.contiguous();
    kernels::Attention a{};
    a.batch = sequences;
    a.heads = heads;
    a.kv_heads = kv_heads;
    a.queries = rows;
    a.keys = most_keys;
    a.query_starts = indices_of(starts);
    a.key_counts = indices_of(counts);
    a.block_table = a.key_counts;  // paged
    a.block_size = block_size;
    a.causal = causal;
    a.window = window.value_or(0);
    return make_gpu_attention_plan(a, query_starts, most_queries);
  }
#endif
  return at::empty({0}, query_starts.options().dtype(at::kInt));
}

void write_kv(const at::Tensor& key, const std::optional<at::Tensor>& value, const at::Tensor& key_cache,
              const std::optional<at::Tensor>& value_cache, const at::Tensor& slot_mapping) {
  const char* op = "quartz::write_kv";
  const bool both = value && value->defined();
  QUARTZ_CHECK_ARGUMENT(both == (value_cache && value_cache->defined()), op, "value_cache",
                        "be given if and only if value is", both ? "none" : "a tensor");
  check_indices(op, "slot_mapping", slot_mapping, 1);
  const c10::DeviceGuard guard(key.device());
  const auto slots = slot_mapping.contiguous();
  const auto one = [&](const char* name, const at::Tensor& rows, const char* cache_name, const at::Tensor& cache) {
    QUARTZ_CHECK_ARGUMENT(rows.dim() == 3, op, name, "have the shape (tokens, heads, size)", rows.sizes());
    QUARTZ_CHECK_ARGUMENT(has_kernel_dtype(rows), op, name, "be float32, float16 or bfloat16", rows.scalar_type());
    check_cache(op, cache_name, cache, rows, name);
    QUARTZ_CHECK_ARGUMENT(cache.size(2) == rows.size(1) && cache.size(3) == rows.size(2), op, cache_name,
                          std::string("have the heads and the size of ") + name, cache.sizes(), " and ", rows.sizes());
    QUARTZ_CHECK_ARGUMENT(slots.size(0) == rows.size(0), op, "slot_mapping", "have one element for each token",
                          slots.size(0), " for ", rows.size(0), " tokens");
    check_same_device(op, {{name, rows}, {cache_name, cache}, {"slot_mapping", slots}});
  };
  one("key", key, "key_cache", key_cache);
  if (both) {
    one("value", *value, "value_cache", *value_cache);
    QUARTZ_CHECK_ARGUMENT(value->size(0) == key.size(0) && value_cache->size(0) == key_cache.size(0) &&
                              value_cache->size(1) == key_cache.size(1),
                          op, "value_cache", "have the blocks and the block size of key_cache", value_cache->sizes(),
                          " and ", key_cache.sizes());
    check_same_device(op, {{"key", key}, {"value", *value}});
  }
  const auto places = indices_of(slots);
  at::Tensor key_rows, value_rows;  // contiguous in the last dimension
  const auto arguments = [&](const at::Tensor& source, const at::Tensor& cache, at::Tensor& rows) {
    rows = with_contiguous_rows(source);
    kernels::WriteKv a{};
    a.dtype = kernel_dtype(rows);
    a.tokens = rows.size(0);
    a.heads = rows.size(1);
    a.size = rows.size(2);
    a.rows = rows.const_data_ptr();
    a.cache = cache.mutable_data_ptr();
    a.row_stride = rows.stride(0);
    a.row_head_stride = rows.stride(1);
    a.block_size = cache.size(1);
    a.block_stride = cache.stride(0);
    a.slot_stride = cache.stride(1);
    a.cache_head_stride = cache.stride(2);
    a.slots = places;
    return a;
  };
  const auto written = [](const at::Tensor& cache) {
    if (!cache.is_inference()) cache.unsafeGetTensorImpl()->bump_version();
  };
  const auto of_keys = arguments(key, key_cache, key_rows);
  const auto of_values = both ? arguments(*value, *value_cache, value_rows) : kernels::WriteKv{};
  if (on_gpu(key)) {
#if QUARTZ_WITH_CUDA
    run_gpu_write_kv(of_keys, both ? &of_values : nullptr, key_cache.size(0), key);
#endif
  } else {
    const int64_t capacity = key_cache.size(0) * key_cache.size(1);
    for (int64_t t = 0; t < slots.size(0); ++t) {
      QUARTZ_CHECK_ARGUMENT(places[t] < capacity, op, "slot_mapping", "be below " + std::to_string(capacity), places[t],
                            " for token ", t);
    }
    kernels::write_kv(of_keys, at_parallel());
    if (both) kernels::write_kv(of_values, at_parallel());
  }
  written(key_cache);
  if (both) written(*value_cache);
}

}  // namespace

QUARTZ_OPERATORS(paged_attention) {
  operators.define(
      "paged_attention(Tensor query, Tensor key_cache, Tensor? value_cache, Tensor block_tables, Tensor query_starts, "
      "Tensor key_counts, float? scale=None, bool causal=True, int? window=None, float? soft_cap=None, "
      "Tensor? sinks=None, int? value_size=None, Tensor? plan=None, int most_queries=0) -> Tensor");
  operators.implement<&paged_attention>("paged_attention");
  operators.define(
      "attention_plan(Tensor query_starts, Tensor key_counts, int rows, int most_keys, int heads, int kv_heads, "
      "bool causal=True, int? window=None, int block_size=16, int most_queries=0) -> Tensor");
  operators.implement<&attention_plan>("attention_plan");
  operators.define(
      "write_kv(Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping) -> ()");
  operators.implement<&write_kv>("write_kv");
}

}  // namespace quartz
