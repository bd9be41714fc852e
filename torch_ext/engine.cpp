// torch_quartz._C.engine: the scheduler of csrc/engine. Arrays of a plan are views of its memory, which lives as long
// as one of them does.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>

#include "engine/scheduler.h"

namespace py = pybind11;

namespace {

using quartz::engine::GroupKind;
using quartz::engine::GroupSpec;
using quartz::engine::Policy;
using quartz::engine::Preemption;
using quartz::engine::RequestOptions;
using quartz::engine::Scheduler;
using quartz::engine::SchedulerConfig;
using quartz::engine::StepOutput;
using quartz::engine::StepPlan;

template <class T>
py::array view(const py::object& owner, const T* data, std::vector<py::ssize_t> shape) {
  py::array_t<T> array(std::move(shape), data, owner);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}
template <class T>
py::array view(const py::object& owner, const std::vector<T>& column) {
  return view(owner, column.data(), {static_cast<py::ssize_t>(column.size())});
}
template <size_t N>
py::array view(const py::object& owner, const std::vector<std::array<int32_t, N>>& rows) {
  const auto* data = rows.empty() ? nullptr : rows.data()->data();
  return view(owner, data, {static_cast<py::ssize_t>(rows.size()), static_cast<py::ssize_t>(N)});
}

template <class Class, class Owner, class T>
void column(Class& bound, const char* name, T Owner::*member, const char* doc) {
  bound.def_property_readonly(
      name, [member](const py::object& self) { return view(self, self.cast<const Owner&>().*member); }, doc);
}

// Integers of a list or an array as int32, without a copy where they are. What would lose a value is refused.
py::array_t<int32_t> integers(const py::handle& values, const char* call, const char* field, py::ssize_t dimensions) {
  const py::array array = py::array::ensure(values);
  if (!array) {
    PyErr_Clear();
    quartz::engine::refuse(call, field, "must be an array of integers", std::string(py::str(py::type::of(values))));
  }
  const std::string rule =
      "must be an array of integers with " + std::to_string(dimensions) + " dimension" + (dimensions == 1 ? "" : "s");
  if (array.ndim() != dimensions)
    quartz::engine::refuse(call, field, rule, std::to_string(array.ndim()) + " dimensions");
  const char kind = array.dtype().kind();
  if (array.size() > 0 && kind != 'i' && kind != 'u') {
    quartz::engine::refuse(call, field, rule, "dtype " + std::string(py::str(array.dtype())));
  }
  if (array.size() > 0 && !array.dtype().is(py::dtype::of<int32_t>()) && array.itemsize() >= 4) {
    const auto wide = py::array_t<int64_t, py::array::c_style | py::array::forcecast>::ensure(array);
    for (py::ssize_t i = 0; i < wide.size(); ++i) {
      const int64_t value = wide.data()[i];
      if (value > std::numeric_limits<int32_t>::max() || value < std::numeric_limits<int32_t>::min()) {
        quartz::engine::refuse(call, field, "must be integers of 32 bits", value);
      }
    }
  }
  return py::array_t<int32_t, py::array::c_style | py::array::forcecast>::ensure(array);
}

GroupKind group_kind(const std::string& kind) {
  if (kind == "full") return GroupKind::kFull;
  if (kind == "sliding") return GroupKind::kSliding;
  if (kind == "state") return GroupKind::kState;
  throw std::invalid_argument("quartz: GroupSpec: kind: must be \"full\", \"sliding\" or \"state\", got \"" + kind +
                              '"');
}
const char* kind_name(GroupKind kind) {
  return kind == GroupKind::kFull ? "full" : kind == GroupKind::kSliding ? "sliding" : "state";
}
[[noreturn]] void refuse_name(const char* field, const char* rule, const std::string& got) {
  quartz::engine::refuse("__init__", field, rule, '"' + got + '"');
}

void bind_config(py::module& m) {
  py::class_<GroupSpec>(m, "GroupSpec",
                        "Layers that share a block table.\n\n"
                        "kind: \"full\" (keys of all tokens), \"sliding\" (a query at p sees p - window + 1 .. p) or\n"
                        "\"state\" (one block a sequence). window: tokens, sliding only. num_blocks: on the device.\n"
                        "host_blocks: in host memory, for preemption by swap.")
      .def(py::init([](const std::string& kind, int64_t window, int64_t num_blocks, int64_t host_blocks) {
             return GroupSpec{group_kind(kind), window, num_blocks, host_blocks};
           }),
           py::arg("kind"), py::arg("window") = 0, py::arg("num_blocks") = 0, py::arg("host_blocks") = 0)
      .def_property(
          "kind", [](const GroupSpec& group) { return kind_name(group.kind); },
          [](GroupSpec& group, const std::string& kind) { group.kind = group_kind(kind); })
      .def_readwrite("window", &GroupSpec::window)
      .def_readwrite("num_blocks", &GroupSpec::num_blocks)
      .def_readwrite("host_blocks", &GroupSpec::host_blocks)
      .def("__repr__", [](const GroupSpec& group) {
        return "GroupSpec(kind='" + std::string(kind_name(group.kind)) + "', window=" + std::to_string(group.window) +
               ", num_blocks=" + std::to_string(group.num_blocks) +
               ", host_blocks=" + std::to_string(group.host_blocks) + ")";
      });

  py::class_<SchedulerConfig>(m, "SchedulerConfig", "What a Scheduler is made for. It is checked by Scheduler().")
      .def(py::init([](int64_t block_size, int64_t max_num_seqs, int64_t max_num_batched_tokens, int64_t max_model_len,
                       std::vector<GroupSpec> groups, bool enable_prefix_caching, const std::string& policy,
                       const std::string& preemption, int64_t max_drafts, bool adaptive_drafts,
                       int64_t max_prefill_tokens_per_request) {
             if (policy != "fcfs" && policy != "priority") {
               refuse_name("policy", "must be \"fcfs\" or \"priority\"", policy);
             }
             if (preemption != "recompute" && preemption != "swap") {
               refuse_name("preemption", "must be \"recompute\" or \"swap\"", preemption);
             }
             SchedulerConfig config;
             config.block_size = block_size;
             config.max_num_seqs = max_num_seqs;
             config.max_num_batched_tokens = max_num_batched_tokens;
             config.max_model_len = max_model_len;
             config.groups = std::move(groups);
             config.enable_prefix_caching = enable_prefix_caching;
             config.policy = policy == "fcfs" ? Policy::kFcfs : Policy::kPriority;
             config.preemption = preemption == "swap" ? Preemption::kSwap : Preemption::kRecompute;
             config.max_drafts = max_drafts;
             config.adaptive_drafts = adaptive_drafts;
             config.max_prefill_tokens_per_request = max_prefill_tokens_per_request;
             return config;
           }),
           py::arg("block_size"), py::arg("max_num_seqs"), py::arg("max_num_batched_tokens"), py::arg("max_model_len"),
           py::arg("groups"), py::arg("enable_prefix_caching") = true, py::arg("policy") = "fcfs",
           py::arg("preemption") = "recompute", py::arg("max_drafts") = 0, py::arg("adaptive_drafts") = false,
           py::arg("max_prefill_tokens_per_request") = 0)
      .def_readonly("block_size", &SchedulerConfig::block_size)
      .def_readonly("max_num_seqs", &SchedulerConfig::max_num_seqs)
      .def_readonly("max_num_batched_tokens", &SchedulerConfig::max_num_batched_tokens)
      .def_readonly("max_model_len", &SchedulerConfig::max_model_len)
      .def_property_readonly("groups", [](const SchedulerConfig& config) { return config.groups; })
      .def_readonly("enable_prefix_caching", &SchedulerConfig::enable_prefix_caching)
      .def_property_readonly("policy",
                             [](const SchedulerConfig& c) { return c.policy == Policy::kFcfs ? "fcfs" : "priority"; })
      .def_property_readonly(
          "preemption",
          [](const SchedulerConfig& c) { return c.preemption == Preemption::kSwap ? "swap" : "recompute"; })
      .def_readonly("max_drafts", &SchedulerConfig::max_drafts)
      .def_readonly("adaptive_drafts", &SchedulerConfig::adaptive_drafts)
      .def_readonly("max_prefill_tokens_per_request", &SchedulerConfig::max_prefill_tokens_per_request);
}

void bind_plan(py::module& m) {
  py::class_<StepPlan, std::shared_ptr<StepPlan>> plan(
      m, "StepPlan",
      "What a step does. Arrays are read-only views with one entry a scheduled sequence unless said otherwise; they\n"
      "live as long as the plan. Order on the device: swap_out, swap_in, copies and state_ops (which do not depend on\n"
      "one another), table_updates, then the forward.");
  plan.def_readonly("step_id", &StepPlan::step_id)
      .def_readonly("num_rows", &StepPlan::num_rows, "Rows of the flattened batch: the sum of query_len.")
      .def_property_readonly("num_seqs", [](const StepPlan& p) { return p.key.size(); });
  column(plan, "key", &StepPlan::key, "int64: the request.");
  column(plan, "index", &StepPlan::index, "Which of its n samples.");
  column(plan, "slot", &StepPlan::slot, "The row of the device tables.");
  column(plan, "query_len", &StepPlan::query_len, "Rows in the batch.");
  column(plan, "start", &StepPlan::start, "Position of the first row; -1: length[slot] - 1, read on the device.");
  column(plan, "drafts", &StepPlan::drafts, "Drafts among the rows.");
  column(plan, "samples", &StepPlan::samples, "1: tokens are drawn behind the rows; 0: a chunk that is not the last.");
  column(plan, "kind", &StepPlan::kind, "0 prefill, 1 decode or verification.");
  column(plan, "max_length", &StepPlan::max_length, "Upper bound of the keys, those of the rows included.");
  column(plan, "logits_from", &StepPlan::logits_from,
         "First position of the prompt in this chunk whose logits are wanted (to the end of the chunk, without the\n"
         "last token of the prompt), -1 none.");
  column(plan, "released", &StepPlan::released, "(m,): slots that were given back since the last plan. Before `new`.");
  column(plan, "table_updates", &StepPlan::table_updates, "(m, 4): group, slot, column, block.");
  column(plan, "copies", &StepPlan::copies, "(m, 3): group, from, to. Whole blocks.");
  column(plan, "swap_out", &StepPlan::swap_out, "(m, 3): group, block, host block. Before everything else.");
  column(plan, "swap_in", &StepPlan::swap_in, "(m, 3): group, block, host block.");
  column(plan, "state_ops", &StepPlan::state_ops,
         "(m, 4): STATE_ZERO or STATE_COPY, group, from (-1 for zero), to. In any order.");
  plan.def_property_readonly(
      "new",
      [](const StepPlan& p) {
        py::list list(p.new_sequences.size());
        for (size_t i = 0; i < p.new_sequences.size(); ++i) {
          const auto& s = p.new_sequences[i];
          list[i] = py::make_tuple(s.slot, s.key, s.index, s.cached);
        }
        return list;
      },
      "(slot, key, index, num_cached_tokens) of sequences that got a slot in this step.");
  plan.def_property_readonly(
      "forked",
      [](const StepPlan& p) {
        py::list list(p.forked.size());
        for (size_t i = 0; i < p.forked.size(); ++i) {
          const auto& s = p.forked[i];
          list[i] = py::make_tuple(s.parent_slot, s.slot, s.key, s.index);
        }
        return list;
      },
      "(parent_slot, slot, key, index) of those among `new` that start with the blocks of another sample.");

  py::class_<StepOutput> output(m, "StepOutput", "What became of the tokens of a step, in the order of its plan.");
  column(output, "key", &StepOutput::key, "int64: the request.");
  column(output, "index", &StepOutput::index, "Which of its n samples.");
  column(output, "num_tokens", &StepOutput::num_tokens, "Tokens of the row that count, after the cut at the end.");
  column(output, "finished", &StepOutput::finished,
         "0 no, 1 stop token, 2 length, 3 it had ended before (the row counts for nothing), 4 error.");
  column(output, "stop_token", &StepOutput::stop_token, "The token that ended it, -1 none.");
  output.def_property_readonly(
      "errors",
      [](const StepOutput& o) {
        py::list list(o.errors.size());
        for (size_t i = 0; i < o.errors.size(); ++i) {
          list[i] = py::make_tuple(o.errors[i].key, o.errors[i].index, o.errors[i].reason);
        }
        return list;
      },
      "(key, index, reason) of those that finished with 4.");
}

py::dict stats_of(const Scheduler& scheduler) {
  const auto stats = scheduler.stats();
  py::list groups;
  for (const auto& group : stats.groups) {
    py::dict d;
    d["num_blocks"] = group.num_blocks;
    d["used"] = group.used;
    d["cached"] = group.cached;
    d["free"] = group.empty;
    d["host_blocks"] = group.host_blocks;
    d["host_used"] = group.host_used;
    groups.append(d);
  }
  py::dict d;
  d["groups"] = groups;
  d["num_waiting"] = scheduler.num_waiting();
  d["num_running"] = scheduler.num_running();
  d["num_preempted"] = scheduler.num_preempted();
  d["num_in_flight"] = scheduler.num_in_flight();
  d["steps"] = stats.steps;
  d["rows"] = stats.rows;
  d["tokens"] = stats.tokens;
  d["prefix_queries"] = stats.prefix_queries;
  d["prefix_hits"] = stats.prefix_hits;
  d["resumed_hits"] = stats.resumed_hits;
  d["prefix_waits"] = stats.prefix_waits;
  d["preemptions"] = stats.preemptions;
  d["swaps_out"] = stats.swaps_out;
  d["swaps_in"] = stats.swaps_in;
  d["evictions"] = stats.evictions;
  d["nodes"] = stats.nodes;
  d["forks"] = stats.forks;
  d["drafts_verified"] = stats.drafts_verified;
  d["drafts_accepted"] = stats.drafts_accepted;
  d["discarded_steps"] = stats.discarded_steps;
  return d;
}

void add_request(Scheduler& scheduler, int64_t key, const py::object& prompt, int64_t max_tokens, int64_t min_tokens,
                 const py::object& stop_ids, int64_t n, int64_t priority, const py::bytes& name_space, bool cache_read,
                 std::optional<int64_t> drafts, int64_t logits_from) {
  RequestOptions options;
  options.key = key;
  options.max_tokens = max_tokens;
  options.min_tokens = min_tokens;
  options.n = n;
  options.priority = priority;
  options.name_space = name_space;
  options.cache_read = cache_read;
  options.logits_from = logits_from;
  if (drafts && *drafts < 0) {
    quartz::engine::refuse("add_request", "drafts", "must be 0 or greater, or None for max_drafts", *drafts);
  }
  options.drafts = drafts.value_or(-1);
  if (logits_from < -1) quartz::engine::refuse("add_request", "logits_from", "must be -1 or a position", logits_from);
  const auto ids = integers(prompt, "add_request", "prompt", 1);
  const auto stops = integers(stop_ids, "add_request", "stop_ids", 1);
  options.stop_ids.assign(stops.data(), stops.data() + stops.size());
  scheduler.add_request(options, ids.data(), ids.size());
}

StepOutput update(Scheduler& scheduler, int64_t step_id, const py::object& tokens, const py::object& available,
                  const py::object& confidences) {
  using quartz::engine::refuse;
  const auto ids = integers(tokens, "update", "tokens", 2);
  const py::ssize_t rows = ids.shape(0), drafts = scheduler.config().max_drafts;
  py::array_t<int32_t> counts;
  if (!available.is_none()) {
    counts = integers(available, "update", "available", 1);
    if (counts.shape(0) != rows)
      refuse("update", "available", "must have an entry for each row of tokens", counts.shape(0));
  }
  py::array_t<float, py::array::c_style | py::array::forcecast> chances;
  if (!confidences.is_none()) {
    chances = decltype(chances)::ensure(confidences);
    if (!chances) {
      PyErr_Clear();
      refuse("update", "confidences", "must be an array of floats", std::string(py::str(py::type::of(confidences))));
    }
    if (chances.ndim() != 2 || chances.shape(0) != rows || chances.shape(1) != drafts) {
      refuse("update", "confidences",
             "must have the shape (" + std::to_string(rows) + ", " + std::to_string(drafts) + ")",
             std::string(py::str(chances.attr("shape"))));
    }
  }
  return scheduler.update(step_id, ids.data(), rows, ids.shape(1), available.is_none() ? nullptr : counts.data(),
                          confidences.is_none() ? nullptr : chances.data());
}

}  // namespace

void bind_engine(py::module& parent) {
  py::module m = parent.def_submodule("engine", "The scheduler of the serving engine (csrc/engine).");
  m.attr("STATE_ZERO") = static_cast<int>(quartz::engine::kZeroState);
  m.attr("STATE_COPY") = static_cast<int>(quartz::engine::kCopyState);
  bind_config(m);
  bind_plan(m);
  py::class_<Scheduler>(m, "Scheduler",
                        "Decides what runs in each step and in which slots and blocks. One thread at a time.\n\n"
                        "schedule() may be called once more before the tokens of the step before are known, then\n"
                        "update() takes the tokens of the older one.")
      .def(py::init<const SchedulerConfig&>(), py::arg("config"))
      .def("add_request", &add_request, py::arg("key"), py::arg("prompt"), py::kw_only(), py::arg("max_tokens"),
           py::arg("min_tokens") = 0, py::arg("stop_ids") = py::tuple(), py::arg("n") = 1, py::arg("priority") = 0,
           py::arg("namespace") = py::bytes(), py::arg("cache_read") = true, py::arg("drafts") = py::none(),
           py::arg("logits_from") = -1,
           "Put a request into the queue. ValueError with field, rule and value for one that can never run.\n\n"
           "priority: smaller comes first (policy \"priority\"). namespace: only requests with the same bytes share\n"
           "cached blocks. cache_read=False: nothing is taken from the prefix cache. drafts: at most so many a step\n"
           "(None: max_drafts). logits_from: prompt rows from this position on give logits too.")
      .def("abort", &Scheduler::abort, py::arg("key"), "End all samples of a request. False: it is not known any more.")
      .def("finish", &Scheduler::finish, py::arg("key"), py::arg("index"),
           "End one sample. Rows of it in flight count for nothing. Unknown ones are fine.")
      .def("schedule", &Scheduler::schedule,
           "Plan the next step. None: nothing can run before update(), or there is nothing to run.")
      .def("update", &update, py::arg("step_id"), py::arg("tokens"), py::arg("available") = py::none(),
           py::arg("confidences") = py::none(),
           "Take the tokens of the oldest step in flight: (sequences, 1 + max_drafts), -1 padded; -1 alone where a\n"
           "sequence should have drawn a token and could not. available, confidences: drafts of the next step.")
      .def("discard", &Scheduler::discard, py::arg("step_id"),
           "A step failed: it and those launched after it count as never run; their sequences start again and keep\n"
           "their output.")
      .def("set_step_times", &Scheduler::set_step_times, py::arg("times"),
           "Times of steps of 0, 1, ... rows, for adaptive_drafts.")
      .def("reset_prefix_cache", &Scheduler::reset_prefix_cache,
           "Forget all cached blocks, and what running requests would have added (after a change of weights).")
      .def_property_readonly("num_waiting", &Scheduler::num_waiting, "Sequences that have not run yet.")
      .def_property_readonly("num_running", &Scheduler::num_running, "Sequences that have a slot.")
      .def_property_readonly("num_preempted", &Scheduler::num_preempted, "Sequences that lost their slot and wait.")
      .def_property_readonly("num_in_flight", &Scheduler::num_in_flight, "Steps launched and not updated.")
      .def_property_readonly("has_unfinished", &Scheduler::has_unfinished)
      .def_property_readonly("max_sequence_tokens", &Scheduler::max_sequence_tokens,
                             "Prompt and output of one sequence at most: max_model_len, or what the blocks hold.")
      .def_property_readonly("config", [](const Scheduler& scheduler) { return scheduler.config(); })
      .def("stats", &stats_of, "Counts: blocks a group, prefix hits (tokens), preemptions, drafts, ...")
      .def("check", &Scheduler::check, "RuntimeError if a block, slot or sequence is lost. For tests.");
}
