// Zero-copy passage between a quartz tensor and its native alias (CPU or CUDA tensor over the same bytes).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "runtime/allocator.h"
#include "runtime/substrate.h"

namespace quartz {

inline bool is_quartz(const at::Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->device_type() == kQuartz;
}

// A lean alias has the native backend key only: no version counter, and to PyTorch's eyes an inference tensor. It is
// what a kernel below autograd needs. A full alias is an ordinary tensor, for Python, Inductor and kernels that ask
// their inputs for requires_grad.
enum class AliasKind { kLean, kFull };

// The native alias of a quartz tensor: same storage bytes, dtype, sizes, strides, offset, conj and neg bits; sparse,
// compressed, nested and quantized tensors are rebuilt from the aliases of their parts.
QUARTZ_API at::Tensor native_alias(const at::Tensor& tensor, AliasKind kind = AliasKind::kLean);

// Dispatch keys that are done with when a kernel of ours runs: autograd, ADInplaceOrView and autocast of any device.
// Without the last one `torch.autocast("cpu")` would change quartz results.
QUARTZ_API extern const c10::DispatchKeySet kAboveKernels;
// For operators that write lists and return nothing (in-place foreach): on cuda some of their kernels count versions
// themselves, the others through the ADInplaceOrView kernels of add_ and its kind, which must therefore still run. On
// host the caller counts.
c10::DispatchKeySet above_list_writers();

// What an operator does with an operand. Kernels that write may count versions themselves (CUDA's foreach and fused
// optimisers do), so a written operand gets a full alias; index operands may stay on the CPU for every device.
enum class Operand { kRead, kWritten, kIndex };

// A tensor that somebody else keeps alive. Counting references is two atomic operations an operand otherwise.
class BorrowedTensor {
 public:
  BorrowedTensor() = default;
  explicit BorrowedTensor(const at::Tensor& owner) : tensor_(Traits::createBorrow(owner)) {}
  BorrowedTensor(BorrowedTensor&& other) noexcept : tensor_(std::move(other.tensor_)) {}
  BorrowedTensor& operator=(BorrowedTensor&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }
  ~BorrowedTensor() { Traits::destroyBorrow(tensor_); }

  const at::Tensor& operator*() const { return tensor_; }

 private:
  using Traits = c10::MaybeOwnedTraits<at::Tensor>;
  at::Tensor tensor_;
};
// So that an array of them is an array of tensors.
static_assert(sizeof(BorrowedTensor) == sizeof(at::Tensor) && alignof(BorrowedTensor) == alignof(at::Tensor));

// PyTorch's error for operands on two devices, with the operator and the argument that is not where the others are.
[[noreturn]] void throw_mixed_devices(c10::Device first, c10::Device second, const std::string& op,
                                      const std::string& argument);

// Whether CUDA refuses 0-dim CPU tensors as operands of this operator ("aten::gather"). Pointwise kernels read them as
// scalars; products, and what finds or moves elements by index, do not.
bool refuses_scalars(const std::string& op);

// One operator call: which aliases stand for which tensors, and which storages were adopted, so that outputs which
// share memory with an argument (views, in-place results) share the argument's storage, and outputs which share memory
// with one another share one storage. The scope does not own its arguments: the caller keeps them alive.
class QUARTZ_API AliasScope {
 public:
  AliasScope() = default;
  explicit AliasScope(c10::Device device) : device_(device), has_device_(true) {}
  AliasScope(const AliasScope&) = delete;
  AliasScope& operator=(const AliasScope&) = delete;
  ~AliasScope();

  // The alias of an argument (other devices' tensors pass through).
  at::Tensor to_native(const at::Tensor& tensor, Operand operand = Operand::kRead) {
    return find_or_make(tensor, operand);
  }
  at::Tensor to_native(at::Tensor&& temporary,
                       Operand operand = Operand::kRead) = delete;  // would not outlive the scope
  c10::Storage to_native(const c10::Storage& storage);
  // The same as a tensor that counts no reference: for as long as the scope and the argument live.
  BorrowedTensor borrow_native(const at::Tensor& tensor, Operand operand = Operand::kRead) {
    return BorrowedTensor(find_or_make(tensor, operand));
  }
  // An output: the argument itself if the kernel handed its alias back, else an adopted tensor.
  at::Tensor to_quartz(const at::Tensor& native);
  // The same for the result of a C++ kernel, by value: a fresh tensor that nobody else holds is relabelled, not
  // rebuilt.
  at::Tensor relabel_or_adopt(at::Tensor native);
  // After the kernel wrote to the alias of `tensor`: sizes, strides, storage and bits follow it.
  void write_back(const at::Tensor& tensor);
  // After the kernel has failed: storages that it resized before follow their twins, all else stays as it was.
  void follow_resized();

  // True once an argument has named the device.
  bool has_device() const { return has_device_; }
  c10::Device device() const { return device_; }
  // Takes the device of an argument; RuntimeError if another argument is on another quartz device.
  void take_device(c10::Device device);
  // The device of new results where the call names one (`to`, `new_zeros`); otherwise it is that of the arguments.
  void set_result_device(c10::Device device) { result_device_ = device; }
  // After that error: true, and a caller who knows the names throws it again with them.
  bool has_two_devices() const { return second_device_.type() == kQuartz; }
  // A CPU tensor with dimensions or that is written, given beside a quartz tensor, else null: refused, since on host
  // memory the kernel would compute with it in silence. Or the tensor of the second quartz device.
  const c10::TensorImpl* misplaced_operand() const {
    return has_two_devices() || !pairs_.empty() ? misplaced_operand_ : nullptr;
  }
  // A 0-dim CPU tensor that is read: misplaced, too, where the operator takes no scalars.
  void refuse_scalars() {
    if (misplaced_operand_ == nullptr) misplaced_operand_ = scalar_operand_;
  }
  [[noreturn]] void throw_mixed_devices(const std::string& op, const std::string& argument) const;
  // The check for own kernels, which know the argument's name only by its place in the schema.
  void check_operands(const char* op) const {
    if (C10_UNLIKELY(misplaced_operand() != nullptr)) throw_mixed_devices(op, "");
  }
  // True if `native` shares memory with the alias of an argument.
  bool is_alias_of_argument(const at::Tensor& native) const;

 private:
  struct Pair {
    c10::TensorImpl* quartz;
    at::Tensor native;
    bool pooled;  // made by take_alias

    at::Tensor tensor() const;  // a reference to `quartz`
  };
  struct KnownStorage {
    c10::Storage quartz;
    const c10::StorageImpl* native;  // identity only
  };

  // The reference is valid until the next argument is taken.
  const at::Tensor& find_or_make(const at::Tensor& tensor, Operand operand);
  Pair make(const at::Tensor& tensor, Operand operand) const;
  void share_borrowed(const at::Tensor& tensor, const at::Tensor& native) const;
  c10::Storage storage_for(const c10::Storage& native);
  c10::Device result_device() const { return result_device_.value_or(device_); }
  at::Tensor adopt_layout(const at::Tensor& native);  // layouts.cpp
  void write_back_layout(const Pair& pair);           // layouts.cpp

  c10::SmallVector<Pair, 8> pairs_;
  c10::SmallVector<KnownStorage, 2> storages_;  // adopted in this call, or arguments themselves
  c10::Device device_{kQuartz, 0};
  c10::Device second_device_{c10::DeviceType::CPU};
  std::optional<c10::Device> result_device_;
  bool has_device_ = false;
  const c10::TensorImpl* misplaced_operand_ = nullptr;  // identity only
  const c10::TensorImpl* scalar_operand_ = nullptr;     // identity only
};

// True for tensors that are more than sizes and strides over a storage: sparse, compressed, nested, quantized, zero.
bool has_special_layout(c10::DispatchKeySet keys);
at::Tensor native_alias_of_layout(const at::Tensor& tensor);  // layouts.cpp

// Copies sizes, strides, offset, conj, neg and wrapped-number bits.
void copy_metadata(c10::TensorImpl& destination, const at::Tensor& source);

}  // namespace quartz
