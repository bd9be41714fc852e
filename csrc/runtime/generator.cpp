#include "runtime/generator.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <vector>

#include "runtime/substrate.h"

namespace quartz {
namespace {

// A generator fixes its device and dispatch keys when it is made, so a native one cannot be relabelled: this one is
// quartz to the dispatcher and holds a native generator for the kernels. On cuda the default one holds CUDA's default
// generator, so kernels that take no generator argument draw from the same state.
class QuartzGenerator final : public c10::GeneratorImpl {
 public:
  QuartzGenerator(c10::DeviceIndex device, at::Generator native)
      : c10::GeneratorImpl(c10::Device(kQuartz, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        native_(std::move(native)) {}

  const at::Generator& native() const { return native_; }

  void set_current_seed(uint64_t seed) override { native_.set_current_seed(seed); }
  uint64_t current_seed() const override { return native_.current_seed(); }
  uint64_t seed() override { return native_.seed(); }
  // The CPU engine has no offset, but pickling a generator of any accelerator asks for one.
  void set_offset(uint64_t offset) override {
    if (substrate().is_cuda()) return native_.set_offset(offset);
    TORCH_CHECK(offset == 0, "quartz: Generator.set_offset: the host generator has no offset, got ", offset);
  }
  uint64_t get_offset() const override { return substrate().is_cuda() ? native_.get_offset() : 0; }
  void set_state(const c10::TensorImpl& state) override { native_.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return native_.unsafeGetGeneratorImpl()->get_state();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = dynamic_cast<QuartzGenerator*>(state.get());
    TORCH_CHECK(other != nullptr, "quartz: Generator.graphsafe_set_state: expected a quartz generator, got one of ",
                state->device());
    native_.unsafeGetGeneratorImpl()->graphsafe_set_state(other->native_.getIntrusivePtr());
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<QuartzGenerator>(device().index(),
                                                at::Generator(native_.unsafeGetGeneratorImpl()->graphsafe_get_state()));
  }

 private:
  QuartzGenerator* clone_impl() const override { return new QuartzGenerator(device().index(), native_.clone()); }

  at::Generator native_;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  device = resolve_device(device);
  check_device(device);
  return at::Generator(c10::make_intrusive<QuartzGenerator>(device, substrate().new_native_generator(device)));
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const auto* all = [] {  // leaked: kernels may draw while the process ends
    auto* generators = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      generators->emplace_back(c10::make_intrusive<QuartzGenerator>(i, substrate().default_native_generator(i)));
    }
    return generators;
  }();
  device = resolve_device(device);
  check_device(device);
  return (*all)[device];
}

const at::Generator& native_generator(const at::Generator& generator) {
  auto* impl = dynamic_cast<QuartzGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "quartz: expected a generator of device quartz, got one of ", generator.device());
  return impl->native();
}

}  // namespace quartz
