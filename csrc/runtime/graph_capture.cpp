#include "runtime/graph_capture.h"

#include <ATen/Context.h>
#include <ATen/ops/clone.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "runtime/generator.h"
#include "runtime/host_guard.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

// A key that is there for modes which see every call first, whatever its arguments are; PyTorch itself gives it to no
// mode. It is in a thread's key set while the thread captures and nowhere else, so other calls pay nothing.
constexpr auto kSeesCalls = DispatchKey::TESTING_ONLY_GenericMode;

// Layers that turn a call into other calls: those are recorded, not this one.
constexpr c10::DispatchKeySet kLayers =
    c10::autocast_dispatch_keyset | c10::python_ks |
    c10::DispatchKeySet({DispatchKey::FuncTorchBatched, DispatchKey::BatchedNestedTensor,
                         DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper,
                         DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode,
                         DispatchKey::Functionalize, DispatchKey::Batched, DispatchKey::VmapMode});

// Changes between what was there and is there are kept by pages of this many bytes: of a large cache into which a call
// writes a few rows only those are.
constexpr std::size_t kPage = 4096;

thread_local std::weak_ptr<Capture> t_capture;

bool on_quartz(const at::Tensor& tensor) { return tensor.device().type() == kQuartz; }

void see_calls(bool on) { c10::impl::tls_set_dispatch_key_included(kSeesCalls, on); }

void see_call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kSeesCalls);
  const auto capture = Capture::current();
  if (capture == nullptr || !capture->under_way()) {
    // Ended by another thread, or a guard that was opened during the capture has restored the key.
    see_calls(false);
    op.redispatchBoxed(below, stack);
    return;
  }
  capture->call(op, below, stack);
}

bool any_tensor(const Stack& stack, std::size_t first, bool (*test)(const at::Tensor&)) {
  bool found = false;
  for (std::size_t i = first; i < stack.size() && !found; ++i) {
    visit_tensors(stack[i], [&](const at::Tensor& tensor) { found = found || test(tensor); });
  }
  return found;
}

bool has_own_kernel_below_autograd(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) || op.hasKernelForDispatchKey(substrate().keys().dense) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
         op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
}

// First and last byte + 1 of a strided tensor in its storage.
std::pair<std::size_t, std::size_t> bytes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); ++i) elements += (tensor.size(i) - 1) * tensor.stride(i);
  const auto size = static_cast<int64_t>(tensor.itemsize());
  const auto begin = tensor.storage_offset() * size;
  return {static_cast<std::size_t>(begin), static_cast<std::size_t>(begin + elements * size)};
}

}  // namespace

Capture::Capture(CaptureMode mode) : mode_(mode), thread_(std::this_thread::get_id()) {}

std::shared_ptr<Capture> Capture::current() { return t_capture.lock(); }

void Capture::begin() {
  for (c10::DeviceIndex i = 0; i < device_count(); ++i) save_generator(default_generator(i));
  program_ = std::make_unique<Program>();
  t_capture = shared_from_this();
  see_calls(true);
}

std::unique_ptr<Program> Capture::end() {
  TORCH_CHECK(failure_.empty(), "quartz: Graph.capture_end: the capture was ended by an error: ", failure_);
  TORCH_CHECK(under_way(), "quartz: Graph.capture_end: no capture is under way");
  if (std::this_thread::get_id() != thread_) {
    TORCH_CHECK(false, "quartz: Graph.capture_end: the capture was begun in another thread; each thread records for ",
                "itself, so end it there");
  }
  if (!c10::impl::tls_is_dispatch_key_included(kSeesCalls)) {
    refuse("the capture",
           "was begun inside of a torch.inference_mode() or another such block and ended outside of it, "
           "where its calls were no longer seen; begin and end it in the same block");
  }
  see_calls(false);
  t_capture.reset();
  restore();
  auto program = std::move(program_);
  program->plan();
  return program;
}

void Capture::abort(const std::string& reason) {
  if (!under_way()) return;
  failure_ = reason;
  if (std::this_thread::get_id() == thread_) {
    see_calls(false);
    t_capture.reset();
  }
  restore();
  program_.reset();
}

void Capture::refuse(const std::string& what, const std::string& why) {
  const auto reason = "quartz: graph capture: " + what + " " + why;
  abort(reason);
  TORCH_CHECK(false, reason);
}

void Capture::save_generator(const at::Generator& generator) {
  for (const auto& saved : generators_) {
    if (saved.generator == generator) return;
  }
  generators_.push_back({generator, at::Tensor(generator.unsafeGetGeneratorImpl()->get_state())});
}

// A storage's memory may have moved (resize_), but what was there before is still at the same place in it.
void Capture::restore() {
  const c10::impl::ExcludeDispatchKeyGuard unseen(kSeesCalls);
  for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved) {
    const auto available = saved->storage.nbytes();
    if (saved->offset >= available) continue;
    std::memcpy(static_cast<char*>(saved->storage.mutable_data()) + saved->offset, saved->bytes.data(),
                std::min(saved->bytes.size(), available - saved->offset));
  }
  saved_.clear();
  for (const auto& saved : generators_) {
    auto* generator = saved.generator.unsafeGetGeneratorImpl();
    const std::lock_guard lock(generator->mutex_);
    generator->set_state(*saved.state.unsafeGetTensorImpl());
  }
  generators_.clear();
}

void Capture::save(const at::Tensor& tensor, std::vector<Saved>& before) {
  if (!tensor.has_storage() || tensor.storage().data() == nullptr) return;
  if (program_->made_here(*tensor.storage().unsafeGetStorageImpl())) return;
  auto [begin, end] = bytes_of(tensor);
  end = std::min(end, tensor.storage().nbytes());
  if (begin >= end) return;
  const auto* bytes = static_cast<const char*>(tensor.storage().data());
  before.push_back({tensor.storage(), begin, std::vector<char>(bytes + begin, bytes + end)});
}

void Capture::keep_changed(std::vector<Saved>& before) {
  for (auto& was : before) {
    if (was.offset + was.bytes.size() > was.storage.nbytes()) continue;  // resized to less: there is no place for it
    const auto* now = static_cast<const char*>(was.storage.data()) + was.offset;
    const auto changed = [&](std::size_t at) {
      return std::memcmp(now + at, was.bytes.data() + at, std::min(kPage, was.bytes.size() - at)) != 0;
    };
    for (std::size_t at = 0; at < was.bytes.size();) {
      if (!changed(at)) {
        at += kPage;
        continue;
      }
      auto end = at + kPage;
      while (end < was.bytes.size() && changed(end)) end += kPage;
      end = std::min(end, was.bytes.size());
      const auto first = was.bytes.begin() + static_cast<std::ptrdiff_t>(at);
      saved_.push_back({was.storage, was.offset + at,
                        std::vector<char>(first, was.bytes.begin() + static_cast<std::ptrdiff_t>(end))});
      at = end;
    }
  }
  before.clear();
}

const Capture::Facts& Capture::facts_of(const c10::OperatorHandle& op) {
  const auto [place, fresh] = facts_.try_emplace(&op.operator_name());
  auto& facts = place->second;
  if (!fresh) return facts;
  const auto& schema = op.schema();
  const auto& name = op.operator_name();
  facts.name = c10::toString(name);
  facts.arguments = schema.arguments().size();
  facts.returns = schema.returns().size();
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    const auto* alias = argument.alias_info();
    facts.written.push_back(alias != nullptr && alias->isWrite());
    writes = writes || facts.written.back();
    // Schemas of batch_norm and its kind do not say that they write these.
    const bool silently = argument.name() == "running_mean" || argument.name() == "running_var";
    facts.restored.push_back(facts.written.back() || silently);
  }
  bool all_arguments = facts.returns != 0;
  for (const auto& value : schema.returns()) {
    facts.is_argument.push_back(value.alias_info() != nullptr);
    all_arguments = all_arguments && facts.is_argument.back();
  }
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::any_of(names.begin(), names.end(), [&](const char* n) { return name.name == n; });
  };
  facts.custom = name.name.rfind("aten::", 0) != 0 && name.name.rfind("prims::", 0) != 0;
  facts.copy = is({"aten::copy_"});
  facts.composite = !facts.custom && !facts.copy && !op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) &&
                    (op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
                     op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
                     op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd));
  facts.metadata = op.hasTag(at::Tag::inplace_view) || (all_arguments && !writes);
  facts.uninitialised = is({"aten::empty", "aten::empty_strided"}) && !writes;
  facts.reads_values = op.hasTag(at::Tag::data_dependent_output) || is({"aten::is_nonzero"});
  facts.masks_by_index = is({"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
                             "aten::_unsafe_index", "aten::_unsafe_index_put"});
  facts.shape_by_values = op.hasTag(at::Tag::dynamic_output_shape) && !facts.masks_by_index;
  facts.below_autograd = has_own_kernel_below_autograd(op);
  return facts;
}

void Capture::check_values_stay(const Facts& facts, const Stack& stack, std::size_t base) {
  if (facts.reads_values) {
    refuse(facts.name,
           "reads a value of a quartz tensor on the host, which a replay could not do again; keep the value "
           "in a tensor, or read it after the replay");
  }
  if (facts.shape_by_values) {
    bool given = false;  // repeat_interleave(..., output_size=n)
    if (facts.name == "aten::repeat_interleave.Tensor") given = !stack[base + 1].isNone();
    if (!given) {
      refuse(facts.name,
             "has a result whose shape depends on values, and a graph holds fixed shapes; use an operator "
             "with a fixed shape (torch.where, masked_fill, topk)");
    }
  }
  if (facts.masks_by_index) {
    bool mask = false;
    visit_tensors(stack[base + 1], [&](const at::Tensor& index) {
      mask = mask || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
    const bool fill = facts.arguments > 2 && stack[base + 2].isTensor() && stack[base + 2].toTensor().numel() == 1;
    if (mask && !fill) {
      refuse(facts.name,
             "takes a mask as its index, so how much it moves depends on values, and a graph holds fixed "
             "shapes; use torch.where or masked_fill");
    }
  }
}

// Copies between the CPU and the device are those that CUDA can record: of pinned memory, without waiting.
void Capture::check_copy(const Stack& stack, std::size_t base) {
  const auto& target = stack[base].toTensor();
  const auto& source = stack[base + 1].toTensor();
  if (on_quartz(target) == on_quartz(source)) return;
  const auto& other = on_quartz(target) ? source : target;
  if (!other.is_cpu()) return;
  const char* direction = on_quartz(target) ? "from the CPU" : "to the CPU";
  if (!other.storage().data() || !substrate().is_pinned(other.storage().data())) {
    refuse(
        std::string("a copy ") + direction,
        on_quartz(target)
            ? "can be recorded only from pinned memory, which each replay reads again; copy before the capture, or "
              "use tensor.pin_memory() and non_blocking=True"
            : "can be recorded only into pinned memory; read the tensor after the replay, or copy into pinned memory "
              "with non_blocking=True");
  }
  if (!stack[base + 2].toBool()) {
    refuse(std::string("a copy ") + direction,
           "waits for the device, which a graph cannot hold; use non_blocking=True");
  }
}

void Capture::check_results(const Facts& facts, const Stack& stack, bool device_arguments) {
  for (std::size_t i = stack.size() - facts.returns; i < stack.size(); ++i) {
    visit_tensors(stack[i], [&](const at::Tensor& tensor) {
      if (!device_arguments && !on_quartz(tensor)) return;
      if (c10::GradMode::is_enabled() && tensor.requires_grad() && !tensor.is_leaf()) {
        refuse(facts.name,
               "would record a gradient, which a graph of the host substrate cannot hold; capture under "
               "torch.no_grad() or torch.inference_mode()");
      }
      if (tensor.is_cpu() && !facts.is_argument[i - (stack.size() - facts.returns)]) {
        refuse(facts.name,
               "returns a CPU tensor of quartz values, which a replay could not hand out again; keep the "
               "result on the device");
      }
      if (tensor.layout() != c10::kStrided || !tensor.has_storage()) {
        if (!facts.metadata) {
          refuse(facts.name, c10::str("returns a tensor of layout ", tensor.layout(),
                                      ", and a graph of the host substrate holds strided tensors"));
        }
      }
    });
  }
}

void Capture::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (keys.has_any(kLayers)) {
    op.redispatchBoxed(keys, stack);
    return;
  }
  const auto self = shared_from_this();  // refuse() may drop the graph's reference
  const auto& facts = facts_of(op);
  const auto base = stack->size() - facts.arguments;
  const bool device_arguments = any_tensor(*stack, base, &on_quartz);
  if (device_arguments) check_values_stay(facts, *stack, base);
  if (facts.composite) {
    op.redispatchBoxed(keys, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard unseen(kSeesCalls);
  if (device_arguments && facts.copy) check_copy(*stack, base);
  const bool fills =
      at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory();
  if (facts.metadata || (facts.uninitialised && !fills)) {
    op.redispatchBoxed(keys, stack);
    check_results(facts, *stack, device_arguments);
    if (!facts.metadata) {
      for (std::size_t i = stack->size() - facts.returns; i < stack->size(); ++i) {
        visit_tensors((*stack)[i], [&](const at::Tensor& tensor) {
          if (on_quartz(tensor)) program_->add_allocation(program_->add_made(tensor.storage()));
        });
      }
    }
    return;
  }
  record(op, facts, keys, stack, device_arguments);
}

void Capture::record(const c10::OperatorHandle& op, const Facts& facts, c10::DispatchKeySet keys, Stack* stack,
                     bool device_arguments) {
  const auto base = stack->size() - facts.arguments;
  if (!device_arguments && !facts.custom) {  // a custom operator may know its device by itself
    const auto names_device = [](const IValue& value) {
      return (value.isDevice() && value.toDevice().type() == kQuartz) ||
             (value.isGenerator() && value.toGenerator().device().type() == kQuartz);
    };
    if (std::none_of(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end(), names_device)) {
      op.redispatchBoxed(keys, stack);
      return;
    }
  }
  program_->release_dead();
  for (std::size_t i = base; i < stack->size(); ++i) {
    if ((*stack)[i].isGenerator() && (*stack)[i].toGenerator().defined()) save_generator((*stack)[i].toGenerator());
  }

  Program::Call call(op);
  call.arguments.assign(stack->begin() + static_cast<std::ptrdiff_t>(base), stack->end());
  call.device = current_device();
  call.inference = c10::InferenceMode::is_enabled();
  call.grad = c10::GradMode::is_enabled();
  call.below_autograd = facts.below_autograd || call.inference;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> kept;  // one for each tensor, which kernels tell apart
  const auto keep = [&](const at::Tensor& tensor) {
    auto& copy = kept[tensor.unsafeGetTensorImpl()];
    if (copy.defined()) return copy;
    // A CPU number is part of the call, as for a CUDA kernel; a pinned source of copy_ is read in each replay.
    const bool constant = tensor.is_cpu() && !facts.copy && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return copy = constant ? program_->keep(at::clone(tensor)) : program_->keep(tensor);
  };
  std::vector<Saved> before;
  for (std::size_t i = 0; i < facts.arguments; ++i) {
    if (facts.restored[i]) {
      visit_tensors(call.arguments[i], [&](const at::Tensor& tensor) {
        if (tensor.layout() != c10::kStrided) {
          refuse(facts.name, c10::str("writes a tensor of layout ", tensor.layout(),
                                      ", and a graph of the host substrate holds strided tensors"));
        }
        if (device_arguments) save(tensor, before);
      });
    }
    if (!facts.written[i]) call.arguments[i] = map_tensors(call.arguments[i], keep);
  }
  try {
    op.redispatchBoxed(keys, stack);
  } catch (...) {
    keep_changed(before);  // of a call that has failed halfway
    throw;
  }
  keep_changed(before);
  check_results(facts, *stack, device_arguments);
  if (facts.custom && device_arguments) {
    for (std::size_t i = stack->size() - facts.returns; i < stack->size(); ++i) {
      const auto& value = (*stack)[i];
      if (value.isInt() || value.isDouble() || value.isBool() || value.isScalar() || value.isComplexDouble()) {
        refuse(facts.name, "returns a number to the host, which a replay could not do again; return it in a tensor");
      }
    }
  }
  // Written arguments as they are now: out= may have resized them.
  for (std::size_t i = 0; i < facts.arguments; ++i) {
    if (!facts.written[i]) continue;
    call.arguments[i] = map_tensors(call.arguments[i], [&](const at::Tensor& tensor) {
      auto& copy = kept[tensor.unsafeGetTensorImpl()];
      return copy.defined() ? copy : copy = program_->keep(tensor);
    });
  }
  add_results(facts, *stack, call);
  // Numbers about tensors (sizes, flags) repeat nothing; neither does what concerns the CPU alone.
  const bool writes = std::find(facts.written.begin(), facts.written.end(), true) != facts.written.end();
  const bool acts = device_arguments && (writes || facts.returns == 0 || facts.custom);
  if (!call.results.empty() || acts) program_->add_call(std::move(call));
}

void Capture::add_results(const Facts& facts, const Stack& stack, Program::Call& call) {
  const auto first = stack.size() - facts.returns;
  std::vector<const c10::StorageImpl*> shared;
  const auto share = [&](const at::Tensor& tensor) {
    if (tensor.has_storage()) shared.push_back(tensor.storage().unsafeGetStorageImpl());
  };
  for (const auto& argument : call.arguments) visit_tensors(argument, share);
  for (std::size_t i = first; i < stack.size(); ++i) {
    visit_tensors(stack[i], [&](const at::Tensor& tensor) {
      const auto position = call.returned++;
      if (facts.is_argument[i - first] || !on_quartz(tensor)) return;
      const auto* storage = tensor.storage().unsafeGetStorageImpl();
      const bool known = std::find(shared.begin(), shared.end(), storage) != shared.end();
      // A tensor that the operator keeps and returns again is the operator's, not the graph's.
      if (!known && !program_->knows(*storage)) program_->add_made(tensor.storage());
      call.results.push_back({position, program_->storage_index(tensor.storage()), program_->keep(tensor), known});
      shared.push_back(storage);
    });
  }
}

bool capturing_on_host() {
  return c10::impl::tls_is_dispatch_key_included(kSeesCalls) && !c10::impl::tls_is_dispatch_key_excluded(kSeesCalls) &&
         Capture::current() != nullptr;
}

void refuse_in_capture(const char* what, const char* instead) {
  if (C10_UNLIKELY(capturing_on_host())) Capture::current()->refuse(what, instead);
}

void refuse_waiting_for_event_in_capture() {
  if (C10_LIKELY(!capturing_on_host()) || Capture::current()->mode() == CaptureMode::kRelaxed) return;
  refuse_in_capture("Event.synchronize()", "waits on the host, which a graph cannot hold; wait after the replay");
}

void register_host_graphs() {
  [[gnu::used]] static auto* library = [] {
    auto* calls = new torch::Library(torch::Library::IMPL, "_", kSeesCalls, __FILE__, __LINE__);
    calls->fallback(torch::CppFunction::makeFromBoxedFunction<&see_call>());
    return calls;
  }();
  operator_removals();  // starts counting
}

}  // namespace quartz
