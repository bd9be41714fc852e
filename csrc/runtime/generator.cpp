#include "runtime/generator.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/ops/empty.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels/philox.h"
#include "runtime/substrate.h"

namespace quartz {
namespace {

// Of the next block of random words. Shared by generators that share their state.
struct Counter {
  std::mutex mutex;
  uint64_t seed, offset;

  explicit Counter(uint64_t seed_, uint64_t offset_ = 0) : seed(seed_), offset(offset_) {}
};

// What get_state gives: this, then the native generator's state.
struct StateHeader {
  char format[8];
  uint64_t seed, offset;
};
constexpr char kFormat[] = {'q', 'u', 'a', 'r', 't', 'z', '0', '1'};

// A generator fixes its device and dispatch keys when it is made, so a native one cannot be relabelled: this one is
// quartz to the dispatcher and holds a native generator for the native kernels. On cuda the default one holds CUDA's
// default generator, so kernels that take no generator argument draw from the same state.
class QuartzGenerator final : public c10::GeneratorImpl {
 public:
  QuartzGenerator(c10::DeviceIndex device, at::Generator native, std::shared_ptr<Counter> counter = nullptr)
      : c10::GeneratorImpl(c10::Device(kQuartz, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        native_(std::move(native)),
        counter_(counter != nullptr ? std::move(counter) : std::make_shared<Counter>(native_.current_seed())) {}

  const at::Generator& native() const { return native_; }

  kernels::RandomSource take(uint64_t blocks) {
    kernels::RandomSource source{};
    if (substrate().take_captured_blocks(native_, blocks, &source)) return source;
    const std::lock_guard lock(counter_->mutex);
    source.seed = counter_->seed;
    source.offset = counter_->offset;
    counter_->offset += blocks;
    return source;
  }

  void set_current_seed(uint64_t seed) override {
    native_.set_current_seed(seed);
    restart(seed);
  }
  uint64_t current_seed() const override {
    const std::lock_guard lock(counter_->mutex);
    return counter_->seed;
  }
  uint64_t seed() override {
    const uint64_t seed = native_.seed();
    restart(seed);
    return seed;
  }
  // The offset is the counter's, in blocks of four words. The native generator keeps its place.
  void set_offset(uint64_t offset) override {
    const std::lock_guard lock(counter_->mutex);
    counter_->offset = offset;
  }
  uint64_t get_offset() const override {
    const std::lock_guard lock(counter_->mutex);
    return counter_->offset;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.layout() == at::kStrided && state.device_type() == at::kCPU && state.dtype() == at::kByte,
                "quartz: Generator.set_state: the state must be a CPU tensor of dtype uint8, got one of ",
                state.device(), " and ", state.dtype());
    const at::Tensor native_state(native_.unsafeGetGeneratorImpl()->get_state());
    const int64_t expected = static_cast<int64_t>(sizeof(StateHeader)) + native_state.numel();
    TORCH_CHECK(state.numel() == expected && state.is_contiguous(),
                "quartz: Generator.set_state: the state of a quartz generator on the ", substrate().name(),
                " substrate has ", expected, " contiguous bytes, got ", state.numel());
    const auto* bytes = static_cast<const char*>(state.data());
    StateHeader header;
    std::memcpy(&header, bytes, sizeof header);
    TORCH_CHECK(std::memcmp(header.format, kFormat, sizeof kFormat) == 0,
                "quartz: Generator.set_state: not the state of a quartz generator of this version");
    const auto copy = at::empty({native_state.numel()}, at::kByte);
    std::memcpy(copy.mutable_data_ptr(), bytes + sizeof header, static_cast<size_t>(copy.numel()));
    native_.unsafeGetGeneratorImpl()->set_state(*copy.unsafeGetTensorImpl());  // refuses what it cannot take
    const std::lock_guard lock(counter_->mutex);
    counter_->seed = header.seed;
    counter_->offset = header.offset;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const at::Tensor native_state(native_.unsafeGetGeneratorImpl()->get_state());
    StateHeader header;
    std::memcpy(header.format, kFormat, sizeof kFormat);
    {
      const std::lock_guard lock(counter_->mutex);
      header.seed = counter_->seed;
      header.offset = counter_->offset;
    }
    auto state = at::empty({static_cast<int64_t>(sizeof header) + native_state.numel()}, at::kByte);
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &header, sizeof header);
    std::memcpy(bytes + sizeof header, native_state.const_data_ptr(), static_cast<size_t>(native_state.numel()));
    return state.getIntrusivePtr();
  }

  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = dynamic_cast<QuartzGenerator*>(state.get());
    TORCH_CHECK(other != nullptr, "quartz: Generator.graphsafe_set_state: expected a quartz generator, got one of ",
                state->device());
    native_.unsafeGetGeneratorImpl()->graphsafe_set_state(other->native_.getIntrusivePtr());
    counter_ = other->counter_;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<QuartzGenerator>(
        device().index(), at::Generator(native_.unsafeGetGeneratorImpl()->graphsafe_get_state()), counter_);
  }

 private:
  QuartzGenerator* clone_impl() const override {
    const std::lock_guard lock(counter_->mutex);
    return new QuartzGenerator(device().index(), native_.clone(),
                               std::make_shared<Counter>(counter_->seed, counter_->offset));
  }
  void restart(uint64_t seed) {
    const std::lock_guard lock(counter_->mutex);
    counter_->seed = seed;
    counter_->offset = 0;
  }

  at::Generator native_;
  std::shared_ptr<Counter> counter_;
};

QuartzGenerator& quartz_generator(const at::Generator& generator) {
  auto* impl = dynamic_cast<QuartzGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "quartz: expected a generator of device quartz, got one of ", generator.device());
  return *impl;
}

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

const at::Generator& native_generator(const at::Generator& generator) { return quartz_generator(generator).native(); }

at::Generator generator_or_default(const std::optional<at::Generator>& generator, c10::Device device) {
  if (!generator) return default_generator(device.index());
  TORCH_CHECK(generator->defined(), "Generator with undefined implementation is not allowed");
  // A quartz generator beside tensors of another device brings their call here too.
  TORCH_CHECK(generator->device().type() == kQuartz && device.type() == kQuartz, "Expected a '", device,
              "' device type for generator but found '", generator->device(), "'");
  return *generator;
}

kernels::RandomSource take_random_blocks(const at::Generator& generator, uint64_t blocks) {
  return quartz_generator(generator).take(blocks);
}

}  // namespace quartz
