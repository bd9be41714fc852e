#include "aten/alias_pool.h"

#include <c10/core/UndefinedTensorImpl.h>

namespace quartz {
namespace {

// A kept alias owns nothing: no storage, version counter, autograd or other metadata.
class PooledAlias final : public c10::TensorImpl {
 public:
  PooledAlias(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype)
      : TensorImpl(VIEW, std::move(storage), keys, dtype) {}

  void set_fields(c10::DispatchKeySet keys, const c10::TensorImpl& original) {
    static constexpr c10::DispatchKeySet kBits({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
    // Sizes, strides, offset, number of elements, wrapped-number bit and the flags derived from them; what it copies
    // beside those is set below or cleared by clear().
    copy_generic_tensor_metadata(&original, this);
    key_set_ = keys | (original.key_set() & kBits);
    data_type_ = original.dtype();
    device_opt_ = storage_.device();
  }
  void set_storage(c10::Storage&& storage) { storage_ = std::move(storage); }

  // The fields that set_fields does not set, as the constructor leaves them. False if one cannot be: then the object
  // is not used again.
  bool clear() noexcept {
    if (has_python_object(*pyobj_slot()) || !allow_tensor_metadata_change_ || storage_access_should_throw_ ||
        custom_sizes_strides_ != 0 || python_custom_sizes_strides_ != 0 || custom_device_ || python_custom_device_ ||
        custom_layout_ || python_custom_layout_ || sizes_strides_policy_ != 0 || device_policy_ || layout_policy_ ||
        has_symbolic_sizes_strides_ || extra_meta_ != nullptr) {
      return false;
    }
    if (C10_UNLIKELY(autograd_meta() != nullptr)) set_autograd_meta(nullptr);
    version_counter_ = c10::VariableVersion(c10::VariableVersion::DISABLED);
    storage_ = c10::Storage();
    return true;
  }

 private:
  template <class Slot>
  static bool has_python_object(const Slot& slot) {
    if constexpr (requires { slot.load_pyobj(); }) {
      return slot.load_pyobj() != nullptr;
    } else {  // PyTorch 2.11
      return slot.check_pyobj().has_value();
    }
  }
};

// Trivially destructible, so that destructors of other thread-local and static objects may still call operators.
struct Pool {
  static constexpr std::size_t kCapacity = 16;
  PooledAlias* kept[kCapacity];
  std::size_t count;
  bool open, closed;
};
constinit thread_local Pool pool{};

struct Closer {
  ~Closer() {
    pool.closed = true;
    while (pool.count != 0) c10::intrusive_ptr<PooledAlias>::reclaim(pool.kept[--pool.count]);
  }
};

// False once the thread is ending.
bool open(Pool& local) {
  if (C10_LIKELY(local.open)) return !local.closed;
  static thread_local Closer closer;  // its destructor is due from here on
  return local.open = true;
}

}  // namespace

at::Tensor take_alias(c10::Storage storage, c10::DispatchKeySet keys, const c10::TensorImpl& original) {
  auto& local = pool;
  c10::intrusive_ptr<PooledAlias> alias;
  if (C10_LIKELY(local.count != 0)) {
    alias = c10::intrusive_ptr<PooledAlias>::reclaim(local.kept[--local.count]);
    alias->set_storage(std::move(storage));
  } else {
    alias = c10::make_intrusive<PooledAlias>(std::move(storage), keys, original.dtype());
  }
  alias->set_fields(keys, original);
  return at::Tensor(std::move(alias));
}

void give_back_alias(at::Tensor&& alias) noexcept {
  auto& local = pool;
  auto* impl = static_cast<PooledAlias*>(alias.unsafeGetTensorImpl());
  // With one strong reference and no weak one nobody else can reach the object. The pool is looked at after clear(),
  // which may free memory and so run anything.
  if (alias.use_count() == 1 && alias.weak_use_count() == 1 && impl->clear() && local.count < Pool::kCapacity &&
      open(local)) {
    local.kept[local.count++] = static_cast<PooledAlias*>(alias.unsafeReleaseTensorImpl());
  } else {
    alias.reset();
  }
}

std::size_t kept_aliases() { return pool.count; }

}  // namespace quartz
