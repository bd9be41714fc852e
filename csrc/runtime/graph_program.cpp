#include "runtime/graph_program.h"

#include <ATen/core/List.h>
#include <ATen/core/ivalue.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <ostream>

#include "runtime/allocator.h"

namespace quartz {
namespace {

using c10::IValue;

constexpr c10::DispatchKeySet kAbove =
    c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

std::atomic<uint64_t> removals{0};

class RemovalCounter final : public c10::OpRegistrationListener {
 public:
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override { removals.fetch_add(1); }
};

void drop_memory(const c10::Storage& storage) {
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, storage.device()));
}

void give_memory(const c10::Storage& storage) {
  const c10::DeviceGuard guard(storage.device());  // the allocator allocates on the current device
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(allocator().allocate(storage.nbytes()));
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.sizes().equals(b.sizes()) && a.strides().equals(b.strides()) &&
         a.storage_offset() == b.storage_offset() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

}  // namespace

uint64_t operator_removals() {
  [[gnu::used]] static auto* listener = new c10::RegistrationHandleRAII(
      c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<RemovalCounter>()));
  return removals.load();
}

at::Tensor recorded_copy(const at::Tensor& tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                          /*allow_tensor_metadata_change=*/true));
}

void visit_tensors(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTuple()) {
    for (const auto& element : value.toTupleRef().elements()) visit_tensors(element, visit);
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) visit_tensors(element, visit);
  } else if (value.isGenericDict()) {
    for (const auto& entry : value.toGenericDict()) visit_tensors(entry.value(), visit);
  }
}

IValue map_tensors(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(map(value.toTensor())) : value;
  if (value.isTuple()) {
    std::vector<IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(map_tensors(element, map));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isList()) {
    // A list of its own also without tensors: the caller may change theirs.
    const auto list = value.toList();
    c10::impl::GenericList result(list.elementType());
    for (const IValue& element : list) result.push_back(map_tensors(element, map));
    return result;
  }
  if (value.isGenericDict()) {
    const auto dict = value.toGenericDict();
    c10::impl::GenericDict result(dict.keyType(), dict.valueType());
    for (const auto& entry : dict) result.insert(entry.key(), map_tensors(entry.value(), map));
    return result;
  }
  return value;
}

std::size_t Program::storage_index(const c10::Storage& storage) {
  const auto [place, fresh] = indices_.try_emplace(storage.unsafeGetStorageImpl(), storages_.size());
  if (fresh) {
    storages_.push_back({storage});
    storages_.back().bytes = storage.nbytes();
  }
  return place->second;
}

bool Program::made_here(const c10::StorageImpl& storage) const {
  const auto found = indices_.find(&storage);
  return found != indices_.end() && storages_[found->second].made;
}

std::size_t Program::add_made(const c10::Storage& storage) {
  const auto index = storage_index(storage);
  storages_[index].made = true;
  living_.push_back(index);
  return index;
}

at::Tensor Program::keep(const at::Tensor& tensor) {
  auto copy = recorded_copy(tensor);
  if (copy.has_storage()) ++storages_[storage_index(copy.storage())].copies;
  return copy;
}

void Program::release_dead() {
  const auto dead = [&](std::size_t index) {
    auto& known = storages_[index];
    if (known.storage.use_count() != known.copies + 1) return false;
    known.dead = true;
    drop_memory(known.storage);
    return true;
  };
  living_.erase(std::remove_if(living_.begin(), living_.end(), dead), living_.end());
}

void Program::plan() {
  release_dead();
  std::vector<std::size_t> last(storages_.size(), calls_.size());
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const auto use = [&](const at::Tensor& tensor) {
      if (tensor.has_storage()) last[indices_.at(tensor.storage().unsafeGetStorageImpl())] = i;
    };
    auto& call = calls_[i];
    for (const auto& argument : call.arguments) visit_tensors(argument, use);
    for (const auto& result : call.results) use(result.tensor);
    call.releases.clear();
  }
  for (std::size_t index = 0; index < storages_.size(); ++index) {
    if (storages_[index].dead && last[index] < calls_.size()) calls_[last[index]].releases.push_back(index);
  }
  // Memory that no call uses is not asked for.
  const auto unused = [&](const Allocation& allocation) {
    return storages_[allocation.storage].dead && last[allocation.storage] == calls_.size();
  };
  allocations_.erase(std::remove_if(allocations_.begin(), allocations_.end(), unused), allocations_.end());
  removals_ = operator_removals();
}

void Program::check_callers_memory() const {
  for (const auto& known : storages_) {
    TORCH_CHECK(known.made || known.storage.nbytes() >= known.bytes,
                "quartz: Graph.replay: the memory of a tensor that the graph uses was resized from ", known.bytes,
                " to ", known.storage.nbytes(), " bytes after the capture");
  }
}

void Program::find_operators_again() {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (auto& call : calls_) {
    const auto found = dispatcher.findSchema(call.name);
    TORCH_CHECK(found.has_value(), "quartz: Graph.replay: the operator ", call.name,
                " was removed after the capture; capture again");
    call.op = *found;
  }
  removals_ = operator_removals();
}

void Program::take_result(const Call& call, const Result& result, const at::Tensor& fresh) {
  const auto& known = storages_[result.storage];
  auto* target = known.storage.unsafeGetStorageImpl();
  TORCH_CHECK(fresh.defined() && fresh.sizes().equals(result.tensor.sizes()) && fresh.dtype() == result.tensor.dtype(),
              "quartz: Graph.replay: ", call.name, " returned ",
              fresh.defined() ? c10::str("shape ", fresh.sizes(), " of ", fresh.dtype()) : "no tensor",
              ", but in the capture shape ", result.tensor.sizes(), " of ", result.tensor.dtype(),
              ": a graph holds calls whose results have the same shape in every replay");
  auto* source = fresh.storage().unsafeGetStorageImpl();
  if (source == target) return;  // an operator that returns a tensor which it keeps
  const bool same = same_layout(fresh, result.tensor);
  if (known.dead && same && source->nbytes() >= target->nbytes() && fresh.storage().use_count() == 1) {
    target->set_data_ptr_noswap(source->set_data_ptr(c10::DataPtr(nullptr, fresh.device())));
    // The twin counts what it has, so the storage must say the same to whoever resizes it.
    target->set_nbytes(source->nbytes());
    return;
  }
  // What is read after the replay stays where it is.
  if (target->data() == nullptr) give_memory(known.storage);
  if (same && source->nbytes() <= target->nbytes()) {
    if (source->nbytes() != 0) std::memcpy(target->mutable_data(), source->data(), source->nbytes());
  } else {
    result.tensor.copy_(fresh);
  }
}

void Program::run(Call& call, std::vector<IValue>& stack) {
  stack.assign(call.arguments.begin(), call.arguments.end());
  call.op.callBoxed(&stack);
  if (!call.results.empty()) {
    std::size_t position = 0;
    auto next = call.results.begin();
    const auto take = [&](const at::Tensor& tensor) {
      if (next != call.results.end() && next->position == position) {
        if (!next->shared) take_result(call, *next, tensor);
        ++next;
      }
      ++position;
    };
    for (const auto& value : stack) {
      if (value.isTensor()) {
        if (value.toTensor().defined()) take(value.toTensor());
      } else {
        visit_tensors(value, take);
      }
    }
    TORCH_CHECK(position == call.returned, "quartz: Graph.replay: ", call.name, " returned ", position,
                " tensors, but ", call.returned, " in the capture");
  }
  for (const auto index : call.releases) drop_memory(storages_[index].storage);
}

void Program::release_intermediates() noexcept {
  for (const auto& known : storages_) {
    if (known.dead) drop_memory(known.storage);
  }
}

void Program::replay() {
  check_callers_memory();
  if (C10_UNLIKELY(removals_ != operator_removals())) find_operators_again();
  if (calls_.empty()) return;
  const c10::DeviceGuard device(c10::Device(kQuartz, calls_.front().device));
  const c10::impl::ExcludeDispatchKeyGuard below(kAbove);
  const auto outside = c10::AutogradState::get_tls_state();
  struct Restore {
    const c10::AutogradState& state;
    ~Restore() { c10::AutogradState::set_tls_state(state); }
  } const restore{outside};
  std::optional<c10::InferenceMode> inference;
  auto allocation = allocations_.begin();
  std::vector<IValue> stack;
  bool in_inference = outside.get_inference_mode();
  try {
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      auto& call = calls_[i];
      for (; allocation != allocations_.end() && allocation->before == i; ++allocation) {
        const auto& known = storages_[allocation->storage];
        if (known.dead) give_memory(known.storage);
      }
      if (C10_UNLIKELY(call.device != current_device())) set_device(call.device);
      if (C10_UNLIKELY(call.inference != in_inference)) {
        inference.reset();
        if (call.inference != outside.get_inference_mode()) inference.emplace(call.inference);
        in_inference = call.inference;
      }
      if (C10_UNLIKELY(c10::AutogradState::get_tls_state().get_grad_mode() != call.grad)) {
        c10::AutogradState::get_tls_state().set_grad_mode(call.grad);
      }
      if (C10_LIKELY(call.below_autograd)) {
        run(call, stack);
      } else {
        const auto keys = c10::impl::tls_local_dispatch_key_set();
        const c10::impl::ForceDispatchKeyGuard above(keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset);
        run(call, stack);
      }
    }
  } catch (...) {
    stack.clear();
    release_intermediates();
    throw;
  }
}

void Program::dump(std::ostream& out) const {
  out << "digraph quartz {\n  node [shape=box];\n";
  std::unordered_map<std::size_t, std::size_t> writer;  // storage -> the last call that made it
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const auto& call = calls_[i];
    out << "  c" << i << " [label=\"" << i << ": " << call.name;
    for (const auto& result : call.results) out << "\\n" << result.tensor.dtype() << " " << result.tensor.sizes();
    out << "\"];\n";
    const auto edge = [&](const at::Tensor& tensor) {
      if (!tensor.has_storage()) return;
      const auto index = indices_.at(tensor.storage().unsafeGetStorageImpl());
      if (const auto found = writer.find(index); found != writer.end() && found->second != i) {
        out << "  c" << found->second << " -> c" << i << ";\n";
      }
    };
    for (const auto& argument : call.arguments) visit_tensors(argument, edge);
    const auto& schema = call.op.schema();
    for (std::size_t a = 0; a < call.arguments.size(); ++a) {
      const auto* alias = schema.arguments()[a].alias_info();
      if (alias == nullptr || !alias->isWrite()) continue;
      visit_tensors(call.arguments[a], [&](const at::Tensor& tensor) {
        if (tensor.has_storage()) writer[indices_.at(tensor.storage().unsafeGetStorageImpl())] = i;
      });
    }
    for (const auto& result : call.results) writer[result.storage] = i;
  }
  out << "}\n";
}

}  // namespace quartz
